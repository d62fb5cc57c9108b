"""No vector depends on its neighbours, and no text is longer than the weights can read, whatever scheme of positions.

Small models of each family have each scaling of rotary positions, windows, and every order of what bounds a text.
"""

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.contract.small_models import HIDDEN_SIZE, TEXTS, WINDOW, make_tokenizer, write_transformer
from tests.models import DEVICE
from tests.processors import without_bf16
from tests.rounds import ask
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import ModelError
from vectormill.domain.task import EMBED
from vectormill.models.families import FAMILIES
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.models.model_entry import ModelEntry
from vectormill.models.specs import make_spec
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.tasks.table import make_tasks
from worker.tokens.tokenizer import LIBRARY_CORES

GROUPED: Final = {"num_key_value_heads": 2, "head_dim": 8}
ORIGINAL: Final = {"original_max_position_embeddings": 16, "factor": 2.5}
FACTORS: Final = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
SCALINGS: Final[dict[str, dict[str, Any]]] = {
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.5},
    "yarn": ORIGINAL,
    "longrope": {**ORIGINAL, **FACTORS},
    "llama3": {**ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
# The classes of transformers whose positions are rotary, and what they need besides.
ROTARY: Final[dict[str, dict[str, Any]]] = {
    "EuroBertModel": {"num_key_value_heads": 2},
    "GemmaModel": GROUPED,
    "Gemma2Model": {**GROUPED, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "LlamaModel": GROUPED,
    "MistralModel": {**GROUPED, "sliding_window": 9},
    "Qwen3Model": GROUPED,
}
# Those whose positions are learned or relative, and the rows of the table that no text uses.
LEARNED: Final[dict[str, int]] = {
    "AlbertModel": 0,
    "BertModel": 0,
    "BigBirdModel": 0,
    "CamembertModel": 1,
    "Data2VecTextModel": 1,
    "DebertaModel": 0,
    "DistilBertModel": 0,
    "ElectraModel": 0,
    "RobertaModel": 1,
    "XLMRobertaModel": 1,
    "XLMRobertaXLModel": 1,
}
LONG: Final = "The sum of all numbers is read here. " * 40
# A word, a text that fills the window, and others between them.
COMPANY: Final = (TEXTS[0], LONG, TEXTS[1], TEXTS[2], "a", LONG[7:])


def read_card(directory: Path) -> ModelCard:
    card = read_model_card("small", directory, ModelEntry(path=str(directory), pooling="mean"))
    if card.flaws:
        raise ModelError(" ".join(card.flaws))
    return card


def load(card: ModelCard, cache_dir: Path, attention: str) -> Encoder:
    return load_encoder(EncoderOrder(card, without_bf16(DEVICE), "torch", "fp32", 1, cache_dir, attention))


def encode(card: ModelCard, encoder: Encoder, texts: Sequence[str], *, alone: bool) -> NDArray[np.float32]:
    """Return the vectors of texts in one batch, or of each alone; what is too long is cut."""
    task = make_tasks(card, num_free_cores=LIBRARY_CORES)[EMBED]
    read, _ = ask(task.process(make_spec(card, EncodingOptions()), [text.encode() for text in texts], 10_000))
    assert not read.failures
    assert read.lengths.max() <= card.max_tokens
    batch = Batch(dict(read.inputs))
    parts = [batch.part(row, row + 1) for row in range(len(batch))] if alone else [batch]
    return np.concatenate([encoder.encode(part).matrix for part in parts])


def assert_alone_as_together(card: ModelCard, cache_dir: Path) -> None:
    family = FAMILIES[card.model_type]
    for attention in ("padded", *(["packed"] if family.positions else [])):
        encoder = load(card, cache_dir, attention)
        alone, together = (encode(card, encoder, COMPANY, alone=is_alone) for is_alone in (True, False))
        assert np.abs(alone - together).max() < 1e-5 * np.abs(alone).max(), attention


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_positions_never_depend_on_the_longest_text_of_a_batch(
    kind: str, scaling: str, tmp_path: Path, cache_dir: Path
) -> None:
    """In transformers, `dynamic` and `longrope` do: they are refused, or no text is so long that they are scaled."""
    rope = {"rope_type": scaling, "rope_theta": 10_000.0, **SCALINGS[scaling]}
    directory = write_transformer(tmp_path / "model", kind, rope_parameters=rope, **ROTARY[kind])
    try:
        card = read_card(directory)
    except ModelError as error:
        assert "config.json" in str(error)  # noqa: PT017 - either is right
        assert "rope" in str(error)  # noqa: PT017
        return
    assert card.max_tokens <= WINDOW
    assert_alone_as_together(card, cache_dir)


@pytest.mark.parametrize("kind", LEARNED)
def test_a_text_has_as_many_tokens_as_there_are_positions_for_it(
    kind: str, tmp_path: Path, cache_dir: Path
) -> None:
    directory = write_transformer(tmp_path / "model", kind)
    card = read_card(directory)
    assert card.max_tokens == WINDOW - LEARNED[kind]
    assert_alone_as_together(card, cache_dir)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    assert read_card(directory).max_tokens == WINDOW - 4 * LEARNED[kind]


@pytest.mark.parametrize("kind", ["BertModel", "RobertaModel"])
def test_the_rows_of_the_table_bound_a_text_whatever_the_configuration_says(
    kind: str, tmp_path: Path
) -> None:
    directory = write_transformer(tmp_path / "model", kind)
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if name.endswith("position_embeddings.weight"))
    tensors[name] = tensors[name][:30].clone()
    save_file(tensors, directory / "model.safetensors")
    assert read_card(directory).max_tokens == 30 - LEARNED[kind]


@pytest.mark.parametrize(
    "bounds",
    [
        *permutations((20, 30, WINDOW)),
        (1000, 10**30, WINDOW),
        (1000, 1000, WINDOW),
        (None, 20, WINDOW),
        (None, 1000, WINDOW),
    ],
)
def test_the_least_of_all_that_bounds_a_text_counts(
    bounds: tuple[int | None, int, int], tmp_path: Path, cache_dir: Path
) -> None:
    """As in sentence-transformers, what the module says is instead of what the tokenizer says."""
    in_module, in_tokenizer, positions = bounds
    tokenizer = make_tokenizer(model_max_length=in_tokenizer)
    directory = write_transformer(tmp_path / "model", tokenizer=tokenizer, max_position_embeddings=positions)
    kinds = {
        "": "base.modules.transformer.Transformer",
        "1_Pooling": "sentence_transformer.modules.pooling.Pooling",
    }
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{name}"}
        for number, (path, name) in enumerate(kinds.items())
    ]
    (directory / "1_Pooling").mkdir()
    pooling = {"embedding_dimension": HIDDEN_SIZE, "pooling_mode": "mean"}
    for name, told in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": in_module}),
    ):
        (directory / name).write_text(json.dumps(told))
    card = read_card(directory)
    assert card.max_tokens == min(in_module or in_tokenizer, positions)
    vectors = encode(card, load(card, cache_dir, "padded"), COMPANY, alone=False)
    assert np.isfinite(vectors).all()


@pytest.mark.parametrize(
    "options", [{"local_attention": 8}, {"local_attention": 8, "global_attn_every_n_layers": 1}]
)
def test_windows_see_no_neighbours(options: dict[str, Any], tmp_path: Path, cache_dir: Path) -> None:
    ids = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    directory = write_transformer(tmp_path / "model", "ModernBertModel", **ids, **options)
    assert_alone_as_together(read_card(directory), cache_dir)


@pytest.mark.parametrize(("attention", "window"), [("block_sparse", 14), ("original_full", WINDOW)])
def test_sparse_attention_never_depends_on_the_texts_before_or_beside(
    attention: str, window: int, tmp_path: Path, cache_dir: Path
) -> None:
    """transformers computes a BigBird's sparse attention for batches that are long enough, until one is not."""
    options = {"attention_type": attention, "block_size": 2, "num_random_blocks": 1}
    card = read_card(write_transformer(tmp_path / "model", "BigBirdModel", **options))
    assert card.max_tokens == window
    assert_alone_as_together(card, cache_dir)


@pytest.mark.parametrize("kind", ["T5EncoderModel", "DebertaV2Model"])
def test_relative_positions_see_no_neighbours(kind: str, tmp_path: Path, cache_dir: Path) -> None:
    sizes = (
        {"d_ff": 64, "d_kv": 8}
        if kind.startswith("T5")
        else {"relative_attention": True, "position_buckets": 16}
    )
    directory = write_transformer(tmp_path / "model", kind, **sizes)
    assert_alone_as_together(read_card(directory), cache_dir)
