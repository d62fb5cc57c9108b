"""ResultColumns: write the results of a collection's rows, for each kind, as JSON and as Parquet columns."""

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

# The parts of an NDJSON line, in order.
Parts = list[bytes | memoryview]


class ResultColumns(Protocol):
    """The JSON and Parquet form of one kind of results."""

    @property
    def part(self) -> str:
        """Return the name of these results in the parameter `include`."""
        ...

    @property
    def compression(self) -> Mapping[str, str]:
        """Return the Parquet compression, by column name, of columns that differ from the default."""
        ...

    def measure(self, results: Results) -> int:
        """Return the approximate size of a row's result as JSON, in bytes."""
        ...

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        """Return the JSON of each row's results as parts of an object: a comma, a name and a value for each field."""
        ...

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        """Return the first row's results as fields of a JSON object."""
        ...

    def fields(self, spec: EncodingSpec) -> list[pa.Field]: ...

    def arrays(self, results: Results, spec: EncodingSpec) -> list[pa.Array]:
        """Return an Arrow array for each of `fields`."""
        ...


class VectorColumns:
    """The ResultColumns of vectors."""

    part: Final = "vector"
    compression: Final = {"embedding.list.element": "none"}  # not compressible

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
        """Return the NumPy type of exported numbers, as for a job: the requested vector type, else float32."""
        return np.dtype(VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].row)

    def _type(self, spec: EncodingSpec) -> pa.DataType:
        width = VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].width(spec.dimensions)
        return pa.list_(NUMBER_FORMATS[self._number(spec)].arrow, width)


class ScoreColumns:
    """The ResultColumns of scores."""

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
    """The ResultColumns of records."""

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
