"""How much of a search's answer a smaller vector type keeps, on real docstrings, a real model and a real Postgres."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sqlalchemy import Engine

from tests.database import ask
from tests.indexed import search_collection
from tests.protocol import SPEC
from tests.reference import packaged_reference
from vectormill.collections.collections import open_collection
from vectormill.collections.generation_tables import find_ranges, upsert_rows
from vectormill.corpus import read_docstrings
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item
from vectormill.ragged import Ragged
from vectormill.vectors.quantization import quantize, restore
from vectormill.vectors.vector_types import make_rows
from worker.chunk.calibrator import Calibrator
from worker.engine.request import EncodeRequest, EncodeResult

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

NUM_TEXTS = 400
NUM_QUERIES = 60
DIMENSIONS = 384


class RealEngine:
    """sentence-transformers in the place of the worker's engine. The same texts it encodes once."""

    def __init__(self, model: "SentenceTransformer") -> None:
        self._model = model
        self._known: dict[tuple[bytes, ...], np.ndarray] = {}

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        n, texts = len(request.texts), tuple(request.texts)
        if texts not in self._known:
            self._known[texts] = encode(self._model, [text.decode() for text in texts])
        vectors = self._known[texts]
        counts = np.full(n, 3, dtype=np.int32)
        return EncodeResult(Ragged.from_matrix(vectors), {}, counts, 4 * n, np.zeros(n, dtype=np.bool_), {})


def encode(model: "SentenceTransformer", texts: Sequence[str]) -> np.ndarray:
    return np.asarray(model.encode(list(texts), convert_to_numpy=True, normalize_embeddings=True))


@pytest.fixture(scope="module")
def model() -> "SentenceTransformer":
    return packaged_reference()


@pytest.fixture(scope="module")
def encoding(model: "SentenceTransformer") -> RealEngine:
    return RealEngine(model)


@pytest.fixture(scope="module")
def vectors(model: "SentenceTransformer") -> np.ndarray:
    """float32 [NUM_TEXTS, 384]; every twelfth docstring, its beginning, so that no module has them all.

    Not fewer: some distributions of Python have 7,000 docstrings, others 8,700.
    """
    texts = [docstring.text[:200] for docstring in islice(read_docstrings(), 0, NUM_TEXTS * 12, 12)]
    return encode(model, texts)


def fill(engine: Engine, spec: EncodingSpec, vectors: np.ndarray, encoding: RealEngine) -> None:
    Calibrator(engine, encoding.encode).prepare(spec, threading.Event())
    kind = spec.kept_type
    items = [Item(str(number), str(number).encode()) for number in range(len(vectors))]
    generation = ask(engine, open_collection, "docs", spec)
    rows = make_rows(vectors, kind, ask(engine, find_ranges, spec))
    ask(engine, upsert_rows, generation.id, 1, items, rows, spec)


@pytest.mark.parametrize(
    ("vector_type", "least"),
    [
        ("float32", 0.995),  # all of them, unless Postgres and NumPy round two that are equally near apart
        ("float16", 0.99),
        ("int8", 0.95),  # 0.997 of 2,500 whole docstrings
        ("binary", 0.6),  # 0.66
    ],
)
def test_most_of_the_ten_nearest_are_found(
    engine: Engine, encoding: RealEngine, vectors: np.ndarray, vector_type: str, least: float
) -> None:
    spec = replace(SPEC, dimensions=DIMENSIONS, vector_type=vector_type)
    fill(engine, spec, vectors, encoding)
    num_found = 0
    with engine.connect() as connection:
        generation = open_collection(connection, "docs", spec)
        for query in vectors[:NUM_QUERIES]:
            nearest = {str(number) for number in np.argsort(-(vectors @ query))[:10]}
            found = search_collection(connection, generation, query, 10)["data"]
            num_found += len(nearest & {match["key"] for match in found})
    assert num_found / (10 * NUM_QUERIES) >= least


def test_the_score_of_codes_is_the_cosine_of_what_they_stand_for(
    engine: Engine, encoding: RealEngine, vectors: np.ndarray
) -> None:
    spec = replace(SPEC, dimensions=DIMENSIONS, vector_type="int8")
    fill(engine, spec, vectors, encoding)
    ranges = ask(engine, find_ranges, spec)
    generation = ask(engine, open_collection, "docs", spec)
    matches = ask(engine, search_collection, generation, vectors[7], 400)["data"]
    assert ranges is not None
    restored = restore(quantize(vectors, ranges), ranges)
    cosines = restored @ vectors[7] / np.linalg.norm(restored, axis=1)
    assert len(matches) == NUM_TEXTS
    expected = [cosines[int(match["key"])] for match in matches]
    np.testing.assert_allclose([match["score"] for match in matches], expected, atol=1e-5)
    # What quantization costs a vector itself, and not only its rank.
    assert ((restored * vectors).sum(axis=1) / np.linalg.norm(restored, axis=1)).min() > 0.98
