"""ResultColumns: write the results of a collection's rows, for each kind, as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from api.streams.vector_streams import NUMBER_FORMATS
from vectormill.collections.row_kinds import Results
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RECORD, SCORE, VECTOR
from vectormill.vectors.scores import describe_numbers

# The parts of an NDJSON line, in order.
Parts = list[bytes | memoryview]


class ResultColumns(Protocol):
    """The JSON form of one kind of results."""

    @property
    def part(self) -> str:
        """Return the name of these results in the parameter `include`."""
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


class VectorColumns:
    """The ResultColumns of vectors."""

    part: Final = "vector"

    def measure(self, results: Results) -> int:
        return NUMBER_FORMATS[results.dtype].slot_bytes * int(results.shape[1])

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        written = NUMBER_FORMATS[results.dtype].write(results)
        return [[b',"embedding":[', row.data] for row in written]

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        return {"embedding": results[0].tolist()}


class ScoreColumns:
    """The ResultColumns of scores."""

    part: Final = "score"

    def measure(self, results: Results) -> int:
        return 40 * (1 + int(results.shape[1]))

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        rows = describe_numbers(results, spec.labels)
        return [[b",", msgspec.json.encode(row)[1:-1]] for row in rows]

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        return dict(describe_numbers(results[:1], spec.labels)[0])


class RecordColumns:
    """The ResultColumns of records."""

    part: Final = "output"

    def measure(self, results: Results) -> int:
        return max(1, sum(map(len, results)) // max(1, len(results)))

    def write(self, results: Results, spec: EncodingSpec) -> Sequence[Parts]:
        return [[b',"output":', output] for output in results]

    def describe(self, results: Results, spec: EncodingSpec) -> dict[str, Any]:
        return {"output": msgspec.json.decode(results[0])}


RESULT_COLUMNS: Final[Mapping[str, ResultColumns]] = {
    VECTOR: VectorColumns(),
    SCORE: ScoreColumns(),
    RECORD: RecordColumns(),
}
