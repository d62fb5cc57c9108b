"""ResultColumns: write the results of a collection's rows, for each kind, as JSON."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from api.streams.vector_streams import NUMBER_FORMATS
from vectormill.collections.row_kinds import Results
from vectormill.domain.encoding import FLOAT32, EncodingSpec
from vectormill.domain.task import (
    DENSE,
    MULTI_VECTOR,
    RECORD,
    REPRESENTATIONS,
    SCORE,
    SPARSE,
    VECTOR,
)
from vectormill.vectors.representations import Representations, unpack
from vectormill.vectors.scores import describe_numbers
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME

# The parts of an NDJSON line, in order.
Parts = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """The JSON form of one kind of results, and their name in the parameter `include`.

    `measure` returns the approximate size of a row's result as JSON, in bytes. `write` returns the JSON of each row's
    results as parts of an object: a comma, a name and a value for each field.
    """

    part: str
    measure: Callable[[Results], int]
    write: Callable[[Results, EncodingSpec], Sequence[Parts]]


def measure_numbers(results: Results) -> int:
    return NUMBER_FORMATS[results.dtype].slot_bytes * int(results.shape[1])


def measure_objects(results: Results) -> int:
    return max(1, sum(map(len, results)) // max(1, len(results)))


def write_embeddings(results: Results, spec: EncodingSpec) -> Sequence[Parts]:
    written = NUMBER_FORMATS[results.dtype].write(results)
    return [[b',"embedding":[', row.data] for row in written]


def write_scores(results: Results, spec: EncodingSpec) -> Sequence[Parts]:
    return [[b",", msgspec.json.encode(row)[1:-1]] for row in describe_numbers(results, spec.labels)]


def write_records(results: Results, spec: EncodingSpec) -> Sequence[Parts]:
    return [[b',"output":', output] for output in results]


def describe_first(results: Results, spec: EncodingSpec) -> dict[str, Any]:
    """Return the first row's results as fields of a JSON object, as a line of NDJSON has them."""
    (parts,) = RESULT_COLUMNS[spec.result].write(results[:1], spec)
    described: dict[str, Any] = msgspec.json.decode(b"{" + b"".join(parts)[1:] + b"}")
    return described


def write_representations(row: Representations, spec: EncodingSpec) -> Parts:
    """Return the JSON of the spec's outputs as parts of an object: a comma, a name and a value for each."""
    parts: Parts = []
    if spec.has_output(DENSE):
        dense = row.dense.astype(VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].row)
        parts += b',"embedding":[', write_numbers(dense[np.newaxis])
    if spec.has_output(SPARSE):
        indices = msgspec.json.encode(row.indices.tolist())
        weights = write_numbers(row.weights[np.newaxis]) if len(row.weights) else b"]"
        parts += b',"sparse":{"indices":', indices, b',"weights":[', weights, b"}"
    if spec.has_output(MULTI_VECTOR):
        parts += b',"multi_vector":[', write_vectors(row.vectors), b"]"
    return parts


def write_vectors(vectors: Results) -> bytes:
    """Return the JSON of vectors [n, d], separated by commas."""
    written: Iterable[Any] = NUMBER_FORMATS[vectors.dtype].write(vectors) if len(vectors) else ()
    return b",".join(b"[" + bytes(vector) for vector in written)


def write_numbers(rows: Results) -> memoryview:
    """Return the JSON of the only row of numbers [1, n], ended by "]"."""
    written: memoryview = NUMBER_FORMATS[rows.dtype].write(rows)[0].data
    return written


RESULT_COLUMNS: Final[Mapping[str, ResultColumns]] = {
    VECTOR: ResultColumns("vector", measure_numbers, write_embeddings),
    SCORE: ResultColumns("score", lambda results: 40 * (1 + int(results.shape[1])), write_scores),
    RECORD: ResultColumns("output", measure_objects, write_records),
    REPRESENTATIONS: ResultColumns(
        "vector",
        lambda results: 6 * measure_objects(results),
        lambda results, spec: [write_representations(unpack(packed), spec) for packed in results],
    ),
}
