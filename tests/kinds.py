"""Specs of each kind of result for tests, and results that are unique to their text; protocol.py has vectors."""

import hashlib
import json
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import DENSE, EXTRACT, JUDGE, MULTI_VECTOR, SPARSE
from vectormill.vectors.representations import Representations

# The labels contain everything that needs quoting in SQL.
LABELS: Final = ("it's", "no %(one)s {0}", 'may"be\\')

VECTORS: Final = EncodingSpec(
    model="fake", revision="1", pooling="mean", normalize=True, dimensions=8, prompt="", max_tokens=64,
)  # fmt: skip
SCORES: Final = replace(
    VECTORS, pooling="cls", dimensions=len(LABELS), task=JUDGE, labels=LABELS, activation="softmax"
)
RECORDS: Final = replace(
    VECTORS,
    pooling="cls",
    normalize=False,
    dimensions=0,
    task=EXTRACT,
    extract_schema='{"人物":null,"地点":null}',
)
MANY: Final = replace(
    VECTORS,
    pooling="cls",
    outputs="dense,sparse,multi_vector",
    sparse_dimensions=100,
    token_dimensions=4,
)


def draw(text: bytes) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()))


def numbers_of(text: bytes, num_labels: int = len(LABELS)) -> npt.NDArray[np.float32]:
    """Return scores float32 [labels] that are unique to the text and sum to 1."""
    return draw(text).dirichlet(np.ones(num_labels)).astype(np.float32)


def records_of(text: bytes) -> list[list[dict[str, Any]]]:
    """Return a place, and a person with its job, that are unique to the text."""
    span = text.decode("utf-8", "replace")
    place = {"type": "地点", "span": "苏州", "offset": [0, int(draw(text).integers(1000))]}
    person = {"type": "人物", "span": span, "offset": [0, len(span)], "confidence": 0.75}
    return [[place], [person, {"type": '职"务', "span": "a\\b", "offset": [1, 2]}], [person]]


def grouped_of(text: bytes) -> dict[str, Any]:
    """Return the records of the text grouped by type, as a collection stores them."""
    place, *persons = records_of(text)
    return {"人物": persons, "地点": [place]}


def record_bytes(text: bytes) -> bytes:
    """Return the records of the text as JSON, as a worker's extraction writes them."""
    return json.dumps(records_of(text), ensure_ascii=False, separators=(",", ":")).encode()


def representations_of(text: bytes, spec: EncodingSpec = MANY) -> Representations:
    """Return the outputs of a spec that are unique to the text, with values that a float16 has exactly."""
    numbers = draw(text)
    dense = (numbers.integers(-64, 64, size=8) / 64).astype(np.float32)
    indices = np.sort(numbers.choice(100, size=int(numbers.integers(1, 9)), replace=False)).astype(np.uint32)
    weights = (numbers.integers(1, 64, size=len(indices)) / 16).astype(np.float32)
    vectors = numbers.integers(-8, 8, size=(int(numbers.integers(1, 6)), 4)).astype(np.float16)
    empty = Representations()
    return Representations(
        dense if spec.has_output(DENSE) else empty.dense,
        indices if spec.has_output(SPARSE) else empty.indices,
        weights if spec.has_output(SPARSE) else empty.weights,
        vectors if spec.has_output(MULTI_VECTOR) else empty.vectors,
    )
