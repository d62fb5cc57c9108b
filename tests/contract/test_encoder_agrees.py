"""Both encoders give the vectors of sentence-transformers, for every architecture, pooling and layout we read."""

import ast
import inspect
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vectormill.domain.errors import ModelError
from vectormill.model_card import parse_pooling
from vectormill.registry import EncodingOptions, Registry, find_packaged_model, make_spec
from vectormill.settings import ModelEntry
from worker.batching.token_batch import TokenBatch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.engine import finish_vectors
from worker.model.encoder import Encoder, EncoderOrder
from worker.model.factory import load_encoder
from worker.tokens.tokenizer import Tokenizer

PACKED = "torch, packed"
BACKENDS = ("torch", PACKED, "openvino")
SENTENCES = [line.strip() for line in inspect.getsource(ast).split("\n") if len(line.strip()) > 20]
TEXTS = [*SENTENCES[:12], " ".join(SENTENCES[:60]), "short", "Ünïcödé, 漢字かな交じり文, русский"]
PACKAGED = find_packaged_model()
assert PACKAGED is not None
DEVICE = split_processor(detect_inventory(), 1)[0]
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "cls+mean")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversions")


def write_transformer(directory: Path, architecture: str) -> Path:
    """A tiny transformer with random weights and the packaged model's tokenizer, in the plain layout."""
    import transformers

    sizes = {"vocab_size": 30522, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 80, "pad_token_id": 0}
    more: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8} if architecture == "Qwen3" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**sizes, **more)
    getattr(transformers, f"{architecture}Model")(config).save_pretrained(directory)
    assert PACKAGED is not None
    for name in TOKENIZER_FILES:
        shutil.copy(PACKAGED / name, directory / name)
    # Said outright, because sentence-transformers gives RoBERTa and MPNet two tokens more than they have positions.
    tokenizer_config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | {"model_max_length": 64}))
    return directory


def reference(directory: Path, prompt: str = "") -> NDArray[np.float32]:
    """What sentence-transformers itself answers."""
    from sentence_transformers import SentenceTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
        vectors: NDArray[np.float32] = model.encode(TEXTS, prompt=prompt, show_progress_bar=False)
    return vectors


def write_sentence_transformer(
    directory: Path, transformer: Path, pooling: str, *, dense: bool = False, include_prompt: bool = True
) -> Path:
    modes = tuple(pooling.split("+"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import itself warns, that the classes move in a later version
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Dense, Pooling, Transformer

        first = Transformer(str(transformer), max_seq_length=64)
        modules: list[Any] = [first, Pooling(32, pooling_mode=modes, include_prompt=include_prompt)]
        if dense:
            torch.manual_seed(1)
            modules.append(Dense(32 * len(modes), 24))
        SentenceTransformer(modules=modules, device="cpu").save(str(directory))
    return directory


def encode(
    directory: Path, backend: str, cache_dir: Path, prompt: str | None = None, alone: bool = False
) -> NDArray[np.float32]:
    """Our vectors of TEXTS, through registry, tokenizer and encoder as the engine uses them."""
    card = Registry({"m": ModelEntry(path=str(directory))}).card("m", weights=True)
    spec = make_spec(card, EncodingOptions(prompt=prompt))
    is_packed, name = backend == PACKED, backend.partition(",")[0]
    encoder: Encoder = load_encoder(
        EncoderOrder(
            card, DEVICE, name, "fp32", DEVICE.num_threads, cache_dir, "packed" if is_packed else "auto"
        )
    )
    assert (encoder.describe().backend.value, encoder.describe().is_packed) == (name, is_packed)
    tokenizer = Tokenizer(card.path, lowercase=card.lowercase)
    texts = tokenizer.tokenize([spec.prompt + text for text in TEXTS], spec.max_tokens, truncate=True)
    prompt_length = 0 if card.include_prompt else tokenizer.count_prompt_tokens(spec.prompt)
    groups = [[i] for i in range(len(TEXTS))] if alone else [list(range(len(TEXTS)))]
    outputs = [
        encoder.encode(TokenBatch.from_ids([texts.ids(i) for i in group], [prompt_length] * len(group)))
        for group in groups
    ]
    assert all(output.dtype == np.float32 and output.shape[1] == card.dimension for output in outputs)
    return finish_vectors(np.concatenate(outputs), spec)


def smallest_cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    assert a.shape == b.shape
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_packaged_model_agrees_with_sentence_transformers(backend: str, cache_dir: Path) -> None:
    assert PACKAGED is not None
    expected = reference(PACKAGED)
    found = encode(PACKAGED, backend, cache_dir)
    assert smallest_cosine(found, expected) >= 0.9999
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5
    assert smallest_cosine(encode(PACKAGED, backend, cache_dir, alone=True), found) >= 0.9999


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ["Bert", "Roberta", "MPNet", "Qwen3"])
def test_architectures_in_the_plain_layout_agree_alone_and_in_a_batch(
    architecture: str, backend: str, cache_dir: Path, tmp_path: Path
) -> None:
    directory = write_transformer(tmp_path / "plain", architecture)
    if (architecture, backend) == ("MPNet", PACKED):
        with pytest.raises(ModelError, match="relative position bias"):
            encode(directory, backend, cache_dir)
        return
    expected = reference(directory)  # mean pooled, as we do; a cosine does not see that ours are normalized
    assert smallest_cosine(encode(directory, backend, cache_dir), expected) >= 0.9999
    assert smallest_cosine(encode(directory, backend, cache_dir, alone=True), expected) >= 0.9999


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_agrees_without_normalization(
    pooling: str, backend: str, cache_dir: Path, tmp_path: Path
) -> None:
    transformer = write_transformer(tmp_path / "plain", "Bert")
    directory = write_sentence_transformer(tmp_path / "st", transformer, pooling)
    assert Registry({"m": ModelEntry(path=str(directory))}).card("m").pooling == parse_pooling(pooling)
    expected = reference(directory)
    found = encode(directory, backend, cache_dir)
    assert smallest_cosine(found, expected) >= 0.9999
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_modules_and_a_prompt_that_is_not_pooled_over_agree(
    backend: str, cache_dir: Path, tmp_path: Path
) -> None:
    transformer = write_transformer(tmp_path / "plain", "Bert")
    directory = write_sentence_transformer(
        tmp_path / "st", transformer, "cls+mean", dense=True, include_prompt=False
    )
    expected = reference(directory, prompt="represent this: ")
    assert expected.shape[1] == 24
    assert (
        smallest_cosine(encode(directory, backend, cache_dir, prompt="represent this: "), expected) >= 0.9999
    )


@pytest.mark.parametrize("name", ["query", "document", None])  # None: the default_prompt_name
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_by_name_and_the_default_one_agree(
    name: str | None, include_prompt: bool, cache_dir: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    transformer = write_transformer(tmp_path / "plain", "Bert")
    directory = write_sentence_transformer(
        tmp_path / "st", transformer, "mean", include_prompt=include_prompt
    )
    path = directory / "config_sentence_transformers.json"
    prompts = {"query": "search query: ", "document": "title: none | text: "}
    config = json.loads(path.read_text()) | {"prompts": prompts, "default_prompt_name": "document"}
    path.write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
        expected = model.encode(TEXTS, prompt_name=name, show_progress_bar=False)
    assert smallest_cosine(encode(directory, "torch", cache_dir, prompt=name), expected) >= 0.9999
    other = "query" if name != "query" else "document"
    assert smallest_cosine(encode(directory, "torch", cache_dir, prompt=other), expected) < 0.9999


def test_a_kept_conversion_is_used_again(cache_dir: Path, tmp_path: Path) -> None:
    directory = write_transformer(tmp_path / "plain", "Bert")
    first = encode(directory, "openvino", cache_dir)
    kept = sorted((cache_dir / "openvino").iterdir())
    assert np.array_equal(encode(directory, "openvino", cache_dir), first)
    assert sorted((cache_dir / "openvino").iterdir()) == kept
