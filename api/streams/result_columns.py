"""ResultColumns: what a collection's rows have of each kind of result, in a line of JSON and as columns of Parquet."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from api.streams.vector_streams import NUMBER_FORMATS
from vectormill.collections.row_kinds import Results
from vectormill.domain.encoding import FLOAT32, EncodingSpec
from vectormill.domain.task import RECORD, SCORE, VECTOR
from vectormill.vectors.scores import Numbers, choose_scores, describe_numbers, names_labels
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME

# Parts of a line, in the order in which they are joined.
Parts = list[bytes | memoryview]


class ResultColumns(Protocol):
    """The columns of results of one kind."""

    @property
    def part(self) -> str:
        """Return the name that `include` has for these results."""
        ...

    @property
    def compression(self) -> Mapping[str, str]:
        """Return the compression of columns that need another one than the rest, by name."""
        ...

    def measure(self, results: Results) -> int:
        """Return about how many bytes a row has as JSON."""
        ...

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        """Return for each row its part of an object: a comma, a name and a value, as often as there are some."""
        ...

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        """Return the first row as an object of its own."""
        ...

    def fields(self, spec: EncodingSpec) -> list[pa.Field]: ...

    def arrays(self, results: Results, spec: EncodingSpec) -> list[pa.Array]:
        """Return an array for each field."""
        ...


class VectorColumns:
    """Implements ResultColumns."""

    part: Final = "vector"
    compression: Final = {"embedding.list.element": "none"}  # as good as random

    def measure(self, results: Results) -> int:
        return NUMBER_FORMATS[results.dtype].slot_bytes * int(results.shape[1])

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        written = NUMBER_FORMATS[results.dtype].write(results)
        return [[b',"embedding":[', row.data] for row in written]

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        return {"embedding": results[0].tolist()}

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        return [pa.field("embedding", self._type(spec))]

    def arrays(self, results: Results, spec: EncodingSpec) -> list[pa.Array]:
        values = pa.array(results.astype(self._number(spec), copy=False).reshape(-1))
        return [pa.FixedSizeListArray.from_arrays(values, type=self._type(spec))]

    def _number(self, spec: EncodingSpec) -> "np.dtype[Any]":
        """Return the type of the numbers, as in the export of a job: the one asked for, else float32."""
        return np.dtype(VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].row)

    def _type(self, spec: EncodingSpec) -> pa.DataType:
        width = VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].width(spec.dimensions)
        return pa.list_(NUMBER_FORMATS[self._number(spec)].arrow, width)


class ScoreColumns:
    """Implements ResultColumns."""

    part: Final = "score"
    compression: Final[Mapping[str, str]] = {}

    def measure(self, results: Results) -> int:
        return 40 * (1 + int(results.shape[1]))

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        rows = describe_numbers(results, spec.labels)
        return [[b",", msgspec.json.encode(row)[1:-1]] for row in rows]

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        return dict(describe_numbers(results[:1], spec.labels)[0])

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        score = pa.field("score", pa.float32(), nullable=False)
        if not names_labels(spec.labels):
            return [score]
        return [score, pa.field("label", pa.string()), pa.field("probabilities", self._type(spec))]

    def arrays(self, results: Numbers, spec: EncodingSpec) -> list[pa.Array]:
        scores, best = choose_scores(results, spec.labels)
        if not names_labels(spec.labels):
            return [pa.array(scores)]
        parts = [pa.array(np.ascontiguousarray(column)) for column in results.T]
        return [
            pa.array(scores),
            pa.array([spec.labels[place] for place in best.tolist()], pa.string()),
            pa.StructArray.from_arrays(parts, fields=list(self._type(spec))),
        ]

    def _type(self, spec: EncodingSpec) -> pa.DataType:
        return pa.struct([pa.field(label, pa.float32(), nullable=False) for label in spec.labels])


class RecordColumns:
    """Implements ResultColumns."""

    part: Final = "output"
    compression: Final[Mapping[str, str]] = {}

    def measure(self, results: Results) -> int:
        return max(1, sum(map(len, results)) // max(1, len(results)))

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        return [[b',"output":', output] for output in results]

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        return {"output": msgspec.json.decode(results[0])}

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        return [pa.field("output", pa.string(), nullable=False)]

    def arrays(self, results: Results, spec: EncodingSpec) -> list[pa.Array]:
        return [pa.array([output.decode() for output in results], pa.string())]


RESULT_COLUMNS: Final[Mapping[str, ResultColumns]] = {
    VECTOR: VectorColumns(),
    SCORE: ScoreColumns(),
    RECORD: RecordColumns(),
}
