"""Both encoders give the vectors of sentence-transformers, for every architecture, pooling, layout and precision."""

import json
import shutil
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.packed_models import MODELS, PADDED_MODELS, TOKENIZER, make_sequences, make_transformer
from tests.models import (
    BACKENDS,
    DEVICE,
    PACKED,
    TEXTS,
    TinyModels,
    encode,
    packaged_model,
    read_card,
    reference,
    smallest_cosine,
)
from tests.processors import with_bf16, without_bf16
from tests.rerankers import DATA, SPECIAL_TOKENS
from tests.rerankers import read_card as read_reranker
from vectormill.domain.errors import ModelError
from vectormill.models.families import FAMILIES
from vectormill.models.poolings import POOLING_NAMES, parse_pooling
from worker.batching.batch import Batch
from worker.devices.device import CPU
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import EncoderOrder
from worker.openvino import conversion
from worker.placement.replicas import ATTENTION

POOLINGS = tuple(POOLING_NAMES)
EACH_ALONE = [[i] for i in range(len(TEXTS))]
# The smallest cosine that is allowed, and the reason.
PRECISIONS = (
    ("fp32", 0.9999),  # the same arithmetic in another order
    ("bf16", 0.999),  # eight bits of mantissa in every product
    ("int8", 0.999),  # rounded weights; the real model keeps 0.9996
)


def write_embedding_gemma(directory: Path) -> Path:
    """Write a tiny one, in the layout in which google/embeddinggemma-300m is published."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = Gemma3TextConfig(
        vocab_size=1000,
        intermediate_size=64,
        num_key_value_heads=1,
        query_pre_attn_scalar=8,
        max_position_embeddings=128,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
        **sizes,
    )
    written = directory / "written"
    model = Gemma3TextModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(written)
    shutil.copy(DATA / "gemma.json", written / "tokenizer.json")
    (written / "tokenizer_config.json").write_text(
        json.dumps({**SPECIAL_TOKENS["gemma"], "model_max_length": 128})
    )
    dense = [Dense(32, 48, bias=False, activation_function=torch.nn.Identity())]
    dense.append(Dense(48, 32, bias=False, activation_function=torch.nn.Identity()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SentenceTransformer(
            modules=[Transformer(str(written)), Pooling(32, pooling_mode="mean"), *dense, Normalize()],
            device="cpu",
            prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
            default_prompt_name="document",
        ).save(str(directory / "saved"))
    return directory / "saved"


CONVERT_IN_CHILD = conversion.convert_in_child


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("precision", "bound"),
    PRECISIONS,
)
def test_the_packaged_model_agrees_with_sentence_transformers(
    precision: str, bound: float, backend: str, cache_dir: Path
) -> None:
    found = encode(packaged_model(), backend, cache_dir, precision=precision)
    assert smallest_cosine(found, reference(packaged_model())) >= bound
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5
    alone = encode(packaged_model(), backend, cache_dir, precision=precision, groups=EACH_ALONE)
    assert smallest_cosine(alone, found) >= (0.999 if precision == "bf16" else 0.9999)


def test_compressed_weights_are_the_same_in_both_backends(cache_dir: Path) -> None:
    """Seen in fp32 arithmetic, which adds next to nothing of its own."""
    by_torch, by_openvino = (
        encode(packaged_model(), backend, cache_dir, precision="int8") for backend in ("torch", "openvino")
    )
    assert smallest_cosine(by_torch, by_openvino) >= 0.9999


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_compressed_weights_give_nearly_the_same_in_bf16_arithmetic(backend: str, cache_dir: Path) -> None:
    exact = encode(packaged_model(), backend, cache_dir, precision="int8")
    found = encode(packaged_model(), backend, cache_dir, precision="int8", device=with_bf16(DEVICE))
    assert smallest_cosine(found, exact) >= 0.999  # as all arithmetic in 16 bit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "architecture",
    ["Bert", "Roberta", "MPNet", "Electra"],
)
def test_architectures_in_the_plain_layout_agree_alone_and_in_a_batch(
    architecture: str, backend: str, cache_dir: Path, models: TinyModels
) -> None:
    directory = models.transformer(architecture)
    if (architecture, backend) == ("MPNet", PACKED):
        with pytest.raises(ModelError, match="relative position bias"):
            encode(directory, backend, cache_dir)
        return
    expected = reference(directory)  # mean pooled, as we do; a cosine does not see that ours are normalized
    assert smallest_cosine(encode(directory, backend, cache_dir), expected) >= 0.9999
    assert smallest_cosine(encode(directory, backend, cache_dir, groups=EACH_ALONE), expected) >= 0.9999


# Families that are compared here alone, since they are never packed, and nothing else compares their padded batches.
HERE = {
    name: architecture.removesuffix("Encoder")
    for name, (architecture, _) in PADDED_MODELS.items()
    if name in FAMILIES and not FAMILIES[name].never_waits
}


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [
        *((name, "torch") for name in HERE.values()),
        *((name, "openvino") for name in ("MT5", "T5", "UMT5")),
    ],
)
def test_families_that_are_never_packed_agree(
    architecture: str, backend: str, cache_dir: Path, models: TinyModels
) -> None:
    directory = models.sentence_transformer("mean", architecture=architecture, dense=True, normalize=True)
    expected = reference(directory)
    assert smallest_cosine(encode(directory, backend, cache_dir), expected) >= 0.9999
    assert smallest_cosine(encode(directory, backend, cache_dir, groups=EACH_ALONE), expected) >= 0.9999


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_runs_on_openvino_unless_its_row_says_why_not(
    model_type: str, cache_dir: Path, tmp_path: Path, models: TinyModels
) -> None:
    """A family with an obstacle is converted nevertheless, to see that it is one."""
    obstacle = FAMILIES[model_type].openvino_obstacle
    if model_type in HERE:
        directory = models.transformer(HERE[model_type])
    else:
        directory = tmp_path / "model"
        make_transformer(model_type).save_pretrained(directory)
        (directory / "tokenizer.json").write_text(TOKENIZER)
    batch = Batch.from_ids(make_sequences())
    card = read_reranker(directory, pooling="mean")
    assert card.model_type == model_type
    exact, other = (
        EncoderOrder(each, without_bf16(DEVICE), backend, "fp32", 1, cache_dir)
        for each, backend in ((card, "torch"), (replace(card, model_type=""), "openvino"))
    )
    if obstacle:
        with pytest.raises(ModelError, match="openvino cannot run this model"):
            load_encoder(other)
        with pytest.raises(ModelError, match=obstacle):
            load_encoder(replace(other, card=card))
    else:
        converted = load_encoder(other)
        assert converted.describe().attention == ATTENTION[CPU]  # as plans assume
        found = converted.encode(batch).matrix
        assert smallest_cosine(found, load_encoder(exact).encode(batch).matrix) >= 0.9999


@pytest.mark.parametrize("backend", BACKENDS)
def test_embedding_gemma_agrees(backend: str, cache_dir: Path, tmp_path: Path) -> None:
    """Its layers look both ways, some within a window, two Dense modules follow, and its prompts are pooled over."""
    from sentence_transformers import SentenceTransformer

    directory = write_embedding_gemma(tmp_path)
    card = read_card(directory)
    assert (len(card.dense), card.normalize, card.default_prompt) == (2, True, "title: none | text: ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    for prompt in ("query", None):
        expected = theirs.encode(TEXTS, prompt_name=prompt, show_progress_bar=False)
        assert smallest_cosine(expected[:-1], expected[1:]) < 0.9
        for groups in ([range(len(TEXTS))], EACH_ALONE):
            found = encode(directory, backend, cache_dir, prompt=prompt, groups=groups)
            assert smallest_cosine(found, expected) >= 0.9999


def test_every_family_is_compared_with_its_reference() -> None:
    """The page of models says so. The others are compared as they are packed, and in padded batches."""
    assert FAMILIES.keys() == {name.partition(",")[0] for name in MODELS | PADDED_MODELS}


# In lesser precisions it says about the weights what the packaged model says, once more.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("precision", "bound"),
    [PRECISIONS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in PRECISIONS[1:])],
)
def test_every_pooling_agrees_without_normalization(
    precision: str, bound: float, backend: str, cache_dir: Path, models: TinyModels
) -> None:
    """One model with all of them concatenated, compared part by part: a conversion takes seconds."""
    directory = models.sentence_transformer("+".join(POOLINGS))
    expected = np.split(reference(directory), len(POOLINGS), axis=1)
    found = np.split(encode(directory, backend, cache_dir, precision=precision), len(POOLINGS), axis=1)
    for mode, ours, theirs in zip(read_card(directory).pooling, found, expected, strict=True):
        assert smallest_cosine(ours, theirs) >= bound, mode
        if precision == "fp32":
            assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max(), mode


def test_each_pooling_is_read_as_sentence_transformers_writes_it(models: TinyModels) -> None:
    for pooling in (*POOLINGS, "cls+mean"):
        assert read_card(models.sentence_transformer(pooling)).pooling == parse_pooling(pooling)


@pytest.mark.parametrize(
    ("normalize", "backend"),
    # Normalizing comes after the backend, so that one backend shows what a model without it gives.
    [
        (False, "torch"),
        (True, "torch"),
        (True, PACKED),
        (True, "openvino"),
    ],
)
def test_dense_modules_and_a_prompt_that_is_not_pooled_over_agree(
    normalize: bool, backend: str, cache_dir: Path, models: TinyModels
) -> None:
    directory = models.sentence_transformer("cls+mean", dense=True, normalize=normalize, include_prompt=False)
    expected = reference(directory, prompt="represent this: ")
    assert expected.shape[1] == 24
    found = encode(directory, backend, cache_dir, prompt="represent this: ")
    assert smallest_cosine(found, expected) >= 0.9999
    if normalize:
        assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_by_name_and_the_default_one_agree(
    include_prompt: bool, cache_dir: Path, models: TinyModels, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    written = models.sentence_transformer("mean", include_prompt=include_prompt)
    directory = Path(shutil.copytree(written, tmp_path / "prompts"))
    path = directory / "config_sentence_transformers.json"
    prompts = {"query": "search query: ", "document": "title: none | text: "}
    config = json.loads(path.read_text()) | {"prompts": prompts, "default_prompt_name": "document"}
    path.write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    for name in ("query", "document", None):  # None: the default_prompt_name
        expected = model.encode(TEXTS, prompt_name=name, show_progress_bar=False)
        assert smallest_cosine(encode(directory, "torch", cache_dir, prompt=name), expected) >= 0.9999
        other = "query" if name != "query" else "document"
        assert smallest_cosine(encode(directory, "torch", cache_dir, prompt=other), expected) < 0.9999


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pads_left", [False, True])
def test_a_causal_model_agrees_whichever_side_its_tokenizer_pads(
    pads_left: bool, backend: str, cache_dir: Path, models: TinyModels
) -> None:
    """We always pad on the right. sentence-transformers pads Qwen3 embedders on the left, with positions to match.

    Two poolings concatenated, compared part by part, as above.
    """
    directory = models.sentence_transformer("lasttoken+mean", architecture="Qwen3", pads_left=pads_left)
    expected = np.split(reference(directory), 2, axis=1)
    found = np.split(encode(directory, backend, cache_dir), 2, axis=1)
    for pooling, ours, theirs in zip(read_card(directory).pooling, found, expected, strict=True):
        assert smallest_cosine(ours, theirs) >= 0.9999, pooling


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(len(TEXTS))), cuts=st.sets(st.integers(1, len(TEXTS) - 1)))
def test_a_vector_does_not_depend_on_the_company_of_its_text(
    backend: str, cache_dir: Path, models: TinyModels, order: list[int], cuts: set[int]
) -> None:
    bounds = [0, *sorted(cuts), len(TEXTS)]
    groups = [order[start:end] for start, end in pairwise(bounds)]
    directory = models.transformer("Bert")
    together = encode(directory, backend, cache_dir, groups=groups)
    assert smallest_cosine(together, reference(directory)[order]) > 0.9999


def test_a_kept_conversion_is_used_again(
    cache_dir: Path, models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by a process of its own, as outside these tests."""
    monkeypatch.setattr(conversion, "convert_in_child", CONVERT_IN_CHILD)
    card = read_card(models.transformer("Bert"))
    order = EncoderOrder(card, DEVICE, "openvino", "int8", DEVICE.num_threads, cache_dir / "kept")
    folder = conversion.find_or_convert(order, "int8")
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert set(written) == {"network.xml", "network.bin", "words.bin", "network.json"}
    assert conversion.find_or_convert(order, "int8") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert list(folder.parent.iterdir()) == [folder]  # no drafts left behind
    exact, same = (conversion.fingerprint_conversion(order, precision) for precision in ("fp32", "bf16"))
    assert exact == same != folder.name
