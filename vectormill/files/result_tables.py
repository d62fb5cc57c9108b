"""ResultTable: the results of items as columns of Arrow and Parquet, for each kind of result."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from vectormill.collections.row_kinds import Results
from vectormill.domain.encoding import FLOAT32, EncodingSpec
from vectormill.domain.task import RECORD, SCORE, VECTOR
from vectormill.vectors.scores import Numbers, choose_scores, names_labels
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME


class ResultTable(Protocol):
    """The columns of one kind of result."""

    @property
    def compression(self) -> Mapping[str, str]:
        """Return the Parquet compression, by column name, of columns that differ from the default."""
        ...

    def fields(self, spec: EncodingSpec) -> list[pa.Field]: ...

    def arrays(self, results: Results, spec: EncodingSpec) -> list[pa.Array]:
        """Return an Arrow array for each of `fields`."""
        ...


class VectorTable:
    """The ResultTable of vectors: one list of fixed size a row, of the requested vector type, else of float32."""

    # Components of unit vectors are nearly random: no compression makes them smaller.
    compression: Final = {"embedding.list.element": "none"}

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        return [pa.field("embedding", self._type(spec))]

    def arrays(self, results: Results, spec: EncodingSpec) -> list[pa.Array]:
        values = pa.array(results.astype(self._number(spec), copy=False).reshape(-1))
        return [pa.FixedSizeListArray.from_arrays(values, type=self._type(spec))]

    def _number(self, spec: EncodingSpec) -> "np.dtype[Any]":
        return np.dtype(VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].row)

    def _type(self, spec: EncodingSpec) -> pa.DataType:
        width = VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].width(spec.dimensions)
        return pa.list_(pa.from_numpy_dtype(self._number(spec)), width)


class ScoreTable:
    """The ResultTable of scores: the score, and with several labels the best one and the number of each."""

    compression: Final[Mapping[str, str]] = {}

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


class RecordTable:
    """The ResultTable of records: the JSON of each item's records."""

    compression: Final[Mapping[str, str]] = {}

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        return [pa.field("output", pa.string(), nullable=False)]

    def arrays(self, results: Results, spec: EncodingSpec) -> list[pa.Array]:
        return [pa.array([output.decode() for output in results], pa.string())]


RESULT_TABLES: Final[Mapping[str, ResultTable]] = {
    VECTOR: VectorTable(),
    SCORE: ScoreTable(),
    RECORD: RecordTable(),
}
