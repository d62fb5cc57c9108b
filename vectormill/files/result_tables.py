"""ResultTable: the results of items as columns of Arrow and Parquet, for each kind of result."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa

from vectormill.domain.encoding import FLOAT32, EncodingSpec
from vectormill.domain.task import (
    DENSE,
    MULTI_VECTOR,
    OUTPUTS,
    RECORD,
    REPRESENTATIONS,
    SCORE,
    SPARSE,
    VECTOR,
)
from vectormill.vectors.representations import NO_INDICES, NO_NUMBERS, unpack
from vectormill.vectors.scores import Numbers, choose_scores, names_labels
from vectormill.vectors.vector_types import VECTOR_TYPE_BY_NAME

if TYPE_CHECKING:
    from vectormill.collections.row_kinds import Results

# A weight of a sparse vector and its place in the vocabulary, from 0.
WEIGHT: Final = pa.struct(
    [pa.field("index", pa.uint32(), nullable=False), pa.field("weight", pa.float32(), nullable=False)]
)

# The Parquet columns of unit vectors, whose components are nearly random: no compression makes them smaller.
UNCOMPRESSED: Final = {"embedding.list.element": "none", "multi_vector.list.element.list.element": "none"}


class ResultTable(Protocol):
    """The columns of one kind of result."""

    def fields(self, spec: EncodingSpec) -> list[pa.Field]: ...

    def arrays(self, results: "Results", spec: EncodingSpec) -> list[pa.Array]:
        """Return an Arrow array for each of `fields`."""
        ...


class VectorTable:
    """The ResultTable of vectors: one list of fixed size a row, of the requested vector type, else of float32."""

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        return [pa.field("embedding", self._type(spec))]

    def arrays(self, results: "Results", spec: EncodingSpec) -> list[pa.Array]:
        values = pa.array(results.astype(_number(spec), copy=False).reshape(-1))
        return [pa.FixedSizeListArray.from_arrays(values, type=self._type(spec))]

    def _type(self, spec: EncodingSpec) -> pa.DataType:
        width = VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].width(spec.dimensions)
        return pa.list_(pa.from_numpy_dtype(_number(spec)), width)


class ScoreTable:
    """The ResultTable of scores: the score, and with several labels the best one and the number of each."""

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

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        return [pa.field("output", pa.string(), nullable=False)]

    def arrays(self, results: "Results", spec: EncodingSpec) -> list[pa.Array]:
        return [pa.array([output.decode() for output in results], pa.string())]


class RepresentationTable:
    """The ResultTable of representations: a column for each output, in the order of OUTPUTS."""

    def fields(self, spec: EncodingSpec) -> list[pa.Field]:
        numbers = pa.from_numpy_dtype(_number(spec))
        fields = {
            DENSE: pa.field("embedding", pa.list_(numbers, spec.dimensions)),
            SPARSE: pa.field("sparse", pa.list_(WEIGHT)),
            MULTI_VECTOR: pa.field("multi_vector", pa.list_(pa.list_(pa.float16(), spec.token_dimensions))),
        }
        return [fields[name] for name in OUTPUTS if spec.has_output(name)]

    def arrays(self, results: "Results", spec: EncodingSpec) -> list[pa.Array]:
        rows = [unpack(packed) for packed in results]
        kinds = {field.name: field.type for field in self.fields(spec)}
        arrays = []
        if spec.has_output(DENSE):
            dense = np.array([row.dense for row in rows], _number(spec)).reshape(-1)
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(dense), type=kinds["embedding"]))
        if spec.has_output(SPARSE):
            weights = pa.StructArray.from_arrays(
                [
                    pa.array(np.concatenate([NO_INDICES, *(row.indices for row in rows)])),
                    pa.array(np.concatenate([NO_NUMBERS, *(row.weights for row in rows)])),
                ],
                fields=list(WEIGHT),
            )
            arrays.append(
                pa.ListArray.from_arrays(_offsets(len(row.indices) for row in rows), weights, kinds["sparse"])
            )
        if spec.has_output(MULTI_VECTOR):
            halves = np.concatenate([np.zeros(0, np.float16), *(row.vectors.reshape(-1) for row in rows)])
            vectors = pa.FixedSizeListArray.from_arrays(
                pa.array(halves), type=kinds["multi_vector"].value_type
            )
            counts = _offsets(len(row.vectors) for row in rows)
            arrays.append(pa.ListArray.from_arrays(counts, vectors, kinds["multi_vector"]))
        return arrays


def _number(spec: EncodingSpec) -> "np.dtype[Any]":
    return np.dtype(VECTOR_TYPE_BY_NAME[spec.vector_type or FLOAT32].row)


def _offsets(counts: Iterable[int]) -> pa.Array:
    """Return the bounds of lists with these lengths."""
    return pa.array(np.cumsum([0, *counts]), pa.int32())


RESULT_TABLES: Final[Mapping[str, ResultTable]] = {
    VECTOR: VectorTable(),
    SCORE: ScoreTable(),
    RECORD: RecordTable(),
    REPRESENTATIONS: RepresentationTable(),
}
