"""Sparse and multi-vector outputs are those of the authors' own packages, alone and in batches, with every backend.

What FlagEmbedding, colbert-ai and PyLate compute is in tests/data/representations, with the program that wrote it;
sentence-transformers runs here.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.random_embedder import write_random_embedder
from tests.models import BACKENDS, DEVICE, PACKED, packaged_model, read_card, smallest_cosine
from tests.processors import with_bf16
from tests.representations import (
    GOLDEN,
    GOLDEN_TEXTS,
    TOKEN_TEXTS,
    WIDE,
    load,
    represent,
    write_masked_language_model,
    write_pylate_colbert,
    write_stanford_colbert,
)
from vectormill.domain.errors import ModelError
from vectormill.domain.task import OUTPUTS
from vectormill.vectors.representations import Representations
from worker.model import heads

ALL = ",".join(OUTPUTS)
LARGEST_DIFFERENCE = 1e-3  # of a sparse weight


@pytest.fixture(scope="session")
def wide_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bge-m3 of two layers whose heads are pickles, as they are published."""
    directory = write_random_embedder(WIDE, packaged_model(), tmp_path_factory.mktemp("m3") / "bge-m3")
    for stem in ("sparse_linear", "colbert_linear"):
        path = directory / f"{stem}.safetensors"
        torch.save(load_file(path), path.with_suffix(".pt"))
        path.unlink()
    return directory


def spread(words: "NDArray[np.integer]", weights: NDArray[np.float32]) -> NDArray[np.float32]:
    whole = np.zeros(50_000, np.float32)
    whole[words] = weights
    return whole


def assert_same(found: Representations, expected: Representations) -> None:
    """Compare each output that is expected: weights by value, so that one near zero may be missing."""
    if len(expected.dense):
        assert smallest_cosine(found.dense[None], expected.dense[None]) >= 0.9999
    weights = spread(found.indices, found.weights) - spread(expected.indices, expected.weights)
    assert np.abs(weights).max() < LARGEST_DIFFERENCE
    assert found.vectors.shape == expected.vectors.shape
    if len(expected.vectors):
        ours, theirs = found.vectors.astype(np.float32), expected.vectors.astype(np.float32)
        assert smallest_cosine(ours, theirs) >= 0.9999
        assert np.abs(ours - theirs).max() < 5e-3  # a cosine does not see the length


@pytest.mark.parametrize("backend", BACKENDS)
def test_bge_m3_agrees_with_flag_embedding(backend: str, wide_m3: Path, cache_dir: Path) -> None:
    arrays = np.load(GOLDEN / "m3.npz")
    expected = [
        Representations(
            arrays["dense"][number],
            *(arrays[f"{number}/{name}"] for name in ("words", "weights", "vectors")),
        )
        for number in range(len(GOLDEN_TEXTS))
    ]
    card = read_card(wide_m3)
    assert (card.outputs, card.sparse_dimensions, card.token_dimensions) == (OUTPUTS, 30522, 1024)
    encoder = load(card, backend, cache_dir)
    assert encoder.describe().backend.value == backend.partition(",")[0]
    for alone in (False, True):
        for found, each in zip(
            represent(card, encoder, GOLDEN_TEXTS, ALL, alone=alone), expected, strict=True
        ):
            assert_same(found, each)
    # Each output is the same whatever else is asked for.
    for name in OUTPUTS[1:]:
        for found, each in zip(represent(card, encoder, GOLDEN_TEXTS, name), expected, strict=True):
            only = (
                Representations(indices=each.indices, weights=each.weights)
                if name == "sparse"
                else Representations(vectors=each.vectors)
            )
            assert_same(found, only)
            assert not len(found.dense)


@cache
def load_theirs(kind: str, directory: Path) -> Any:
    """Return the model as sentence-transformers reads it."""
    return getattr(sentence_transformers, kind)(str(directory), device="cpu", local_files_only=True)


def weigh_by_sentence_transformers(directory: Path) -> list[Representations]:
    vectors = load_theirs("SparseEncoder", directory).encode(SPARSE_TEXTS, convert_to_sparse_tensor=False)
    return [
        Representations(indices=row.nonzero().flatten().numpy(), weights=row[row > 0].numpy())
        for row in vectors
    ]


SPARSE_TEXTS = [*GOLDEN_TEXTS, " ".join(GOLDEN_TEXTS * 8)]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("Bert", "torch"), ("Bert", PACKED)]
    + [
        (kind, backend)
        for kind in ("DistilBert", "XLMRoberta", "ModernBert")
        for backend in ("torch", PACKED)
    ],
)
def test_splade_agrees_with_sentence_transformers(
    kind: str, backend: str, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        heads, "MOST_LOGITS", 50 * 30522
    )  # texts lie across the bounds of what is held at once
    directory = write_masked_language_model(tmp_path / "splade-model", kind)
    expected = weigh_by_sentence_transformers(directory)
    card = read_card(directory)
    assert (card.outputs, card.sparse_dimensions, card.dimension) == (("sparse",), 30522, 0)
    encoder = load(card, backend, cache_dir)
    for alone in (False, True):
        for found, each in zip(
            represent(card, encoder, SPARSE_TEXTS, "sparse", alone=alone), expected, strict=True
        ):
            assert_same(found, each)


def vectors_by_sentence_transformers(directory: Path, texts: list[str], side: str) -> list[Representations]:
    model = load_theirs("MultiVectorEncoder", directory)
    given = (model.encode_query if side == "query" else model.encode_document)(texts, convert_to_numpy=True)
    return [Representations(vectors=each.astype(np.float16)) for each in given]


def write_saved_again(directory: Path) -> Path:
    """Write a ColBERT of Stanford's as sentence-transformers saves it."""
    source = write_stanford_colbert(directory / "before")
    load_theirs("MultiVectorEncoder", source).save_pretrained(str(directory / "after"))
    return directory / "after"


COLBERTS: dict[str, Callable[[Path], Path]] = {
    "stanford": write_stanford_colbert,
    "stanford, attending": partial(write_stanford_colbert, attend_to_mask_tokens=True),
    "pylate": write_pylate_colbert,
    "pylate, not filled up": partial(write_pylate_colbert, do_query_expansion=False),
    "pylate, with a prompt": partial(write_pylate_colbert, prompts={"query": "find: "}),
    "sentence-transformers": write_saved_again,
}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("stanford", "torch"),
        ("stanford, attending", PACKED),
        ("pylate", "openvino"),
        ("sentence-transformers", "torch"),
        *((kind, "torch") for kind in COLBERTS if kind != "stanford"),
    ],
)
def test_colbert_agrees_with_sentence_transformers(
    kind: str, backend: str, tmp_path: Path, cache_dir: Path
) -> None:
    directory = COLBERTS[kind](tmp_path / "model")
    card = read_card(directory)
    assert (card.outputs, card.token_dimensions, card.dimension) == (("multi_vector",), 128, 0)
    encoder = load(card, backend, cache_dir)
    for side in ("query", "document"):
        expected = vectors_by_sentence_transformers(directory, TOKEN_TEXTS, side)
        prompt = side if side == "query" else None  # documents are the default
        for alone in (False, True):
            found = represent(card, encoder, TOKEN_TEXTS, "multi_vector", prompt=prompt, alone=alone)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize(
    ("authors", "write"), [("stanford", write_stanford_colbert), ("pylate", write_pylate_colbert)]
)
def test_colbert_agrees_with_its_authors(
    authors: str, write: Callable[[Path], Path], tmp_path: Path, cache_dir: Path
) -> None:
    arrays = np.load(GOLDEN / f"{authors}.npz")
    card = read_card(write(tmp_path / "model"))
    encoder = load(card, "torch", cache_dir)
    for side in ("query", "document"):
        found = represent(card, encoder, TOKEN_TEXTS, "multi_vector", prompt=side)
        for number, each in enumerate(found):
            assert_same(each, Representations(vectors=arrays[f"{side}/{number}"]))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("write", "outputs", "backend"),
    [
        (partial(write_random_embedder, WIDE, packaged_model()), ALL, "torch"),
        (partial(write_random_embedder, WIDE, packaged_model()), ALL, "openvino"),
        (write_masked_language_model, "sparse", "torch"),
        (write_pylate_colbert, "multi_vector", "torch"),
    ],
)
def test_outputs_keep_their_meaning_in_fewer_bits(
    write: Callable[[Path], Path], outputs: str, backend: str, precision: str, tmp_path: Path, cache_dir: Path
) -> None:
    card = read_card(write(tmp_path / "splade"))
    exact = represent(card, load(card, "torch", cache_dir), GOLDEN_TEXTS, outputs)
    device = with_bf16(DEVICE) if precision == "bf16" else DEVICE
    found = represent(card, load(card, backend, cache_dir, precision, device), GOLDEN_TEXTS, outputs)
    largest = max(each.weights.max(initial=0) for each in exact)
    for one, other in zip(found, exact, strict=True):
        for ours, theirs in ((one.dense[None], other.dense[None]), (one.vectors, other.vectors)):
            assert (
                not ours.size or smallest_cosine(ours.astype(np.float32), theirs.astype(np.float32)) >= 0.999
            )
        weights = spread(other.indices, other.weights)
        assert np.abs(spread(one.indices, one.weights) - weights).max() <= 0.03 * largest


def test_queries_with_tokens_that_no_token_attends_to_are_never_packed(
    tmp_path: Path, cache_dir: Path
) -> None:
    card = read_card(write_stanford_colbert(tmp_path / "model"))
    with pytest.raises(
        ModelError, match="have tokens that no token attends to, which the packed kernel cannot do"
    ):
        load(card, PACKED, cache_dir)


def test_the_weights_of_words_are_left_to_torch(tmp_path: Path, cache_dir: Path) -> None:
    card = read_card(write_masked_language_model(tmp_path / "splade", hidden_size=32, num_attention_heads=2))
    report = load(card, "auto", cache_dir).describe()
    assert report.backend.value == "torch"
    assert (
        report.backend.reason
        == "openvino cannot run this model: only torch computes the weights of words (SPLADE)"
    )
