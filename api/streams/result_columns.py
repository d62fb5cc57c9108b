"""Write the results of rows as JSON, for each kind of result."""

from collections.abc import Iterable
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

# The name of each kind of results in the parameter `include`.
PARTS: Final = {VECTOR: "vector", SCORE: "score", RECORD: "output", REPRESENTATIONS: "vector"}
# The parts of an NDJSON line, in order.
Parts = list[bytes | memoryview]


def measure(results: Results, spec: EncodingSpec) -> int:
    """Return the approximate size of a row's results as JSON, in bytes."""
    if spec.result == VECTOR:
        return NUMBER_FORMATS[results.dtype].slot_bytes * int(results.shape[1])
    if spec.result == SCORE:
        return 40 * (1 + int(results.shape[1]))
    num_bytes = max(1, sum(map(len, results)) // max(1, len(results)))
    # A packed number has six times as many digits.
    return num_bytes if spec.result == RECORD else 6 * num_bytes


def write_results(results: Results, spec: EncodingSpec) -> list[Parts]:
    """Return the JSON of each row's results as parts of an object: a comma, a name and a value for each field.

    Representations have a field for each output, in the order of OUTPUTS.
    """
    if spec.result == VECTOR:
        return [[b',"embedding":[', row.data] for row in NUMBER_FORMATS[results.dtype].write(results)]
    if spec.result == SCORE:
        return [[b",", msgspec.json.encode(row)[1:-1]] for row in describe_numbers(results, spec.labels)]
    if spec.result == RECORD:
        return [[b',"output":', output] for output in results]
    return [write_representations(unpack(packed), spec) for packed in results]


def describe_first(results: Results, spec: EncodingSpec) -> dict[str, Any]:
    """Return the first row's results as fields of a JSON object, as a line of NDJSON has them."""
    (parts,) = write_results(results[:1], spec)
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
