"""The result `representation`: one or several outputs of an encoding: dense, sparse and multi-vector."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt

from vectormill.db.parameters import Field, FindOid, split_row
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, MULTI_VECTOR, OUTPUTS, REPRESENTATIONS, SPARSE
from vectormill.jobs.item import TOO_MANY_WEIGHTS, ItemFailure
from vectormill.results.kind import (
    LEAST_AGREEMENT,
    Column,
    LoadedColumn,
    Objects,
    Parts,
    Results,
    take_objects,
)
from vectormill.results.vectors import list_type, make_lists, scan_dense
from vectormill.vectors.decimals import NUMBER_FORMATS
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.representations import (
    MAX_WEIGHTS,
    NO_INDICES,
    NO_NUMBERS,
    Representations,
    measure_agreement,
    read_sparse,
    read_vectors,
    send_sparse,
    send_vectors,
    unpack,
)
from vectormill.vectors.residual_codes import Codebook, restore
from vectormill.vectors.vector_types import find_vector_failures, read_columns, send_rows

# The column of each output, in the tables and in the view of a collection.
OUTPUT_COLUMNS: Final[Mapping[str, str]] = {
    DENSE: "embedding",
    SPARSE: "sparse",
    MULTI_VECTOR: "multi_vector",
}
HALVES: Final = "halfvec"
WRAPPER: Final = "vectormill.multi_vector"
CODES: Final = "multi_vector_codes"
# An indexer that knows no codes copies rows without them; this makes it fail.
NOT_BOTH_NULL: Final = " CHECK (num_nonnulls(multi_vector, multi_vector_codes) > 0)"


@dataclass(frozen=True, slots=True)
class ManyRepresentations(Objects):
    """The ResultKind of representations. Results are objects [n], each the packed form of an item's outputs.

    Dense vectors have the column type of the kind Vectors, sparse ones are a sparsevec. Multi-vectors are an array of
    halfvec, or if that is NULL, residual codes. Codes beside halves are those of an earlier text and mean nothing:
    a process that knows no codes leaves them. Rows are read as the binary form of a SQL row of these columns.

    Codes are read with `codebook`, that of the vector space, and written if `writes_codes`.
    """

    codebook: Codebook | None = None
    writes_codes: bool = False

    result: ClassVar[str] = REPRESENTATIONS

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        types = {
            DENSE: (spec.kept_type.column, spec.dimensions),
            SPARSE: ("sparsevec", spec.sparse_dimensions),
            MULTI_VECTOR: (HALVES, spec.token_dimensions),
        }
        columns = [Column(OUTPUT_COLUMNS[name], *types[name]) for name in OUTPUTS if spec.has_output(name)]
        if spec.has_output(MULTI_VECTOR):
            columns[-1] = replace(columns[-1], is_nullable=True, wrapper=WRAPPER)
            columns.append(Column(CODES, "bytea", is_nullable=True, constraint=NOT_BOTH_NULL, is_shown=False))
        return tuple(columns)

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"record_send(ROW({', '.join(f'{table}.{column.name}' for column in self.columns(spec))}))"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        rows: list[bytes] = wire if isinstance(wire, list) else [wire]
        return take_objects([self._read_row(bytes(row), spec).pack() for row in rows])

    def _read_row(self, row: bytes, spec: EncodingSpec) -> Representations:
        fields: dict[str, Any] = dict(
            zip((column.name for column in self.columns(spec)), split_row(row), strict=True)
        )
        read = Representations()
        if spec.has_output(DENSE):
            (dense,) = read_columns(fields["embedding"], spec.kept_type, spec.dimensions).astype(np.float32)
            read = replace(read, dense=dense)
        if spec.has_output(SPARSE):
            indices, weights = read_sparse(fields["sparse"])
            read = replace(read, indices=indices, weights=weights)
        if spec.has_output(MULTI_VECTOR):
            vectors = self.read_tokens(fields["multi_vector"], fields[CODES], spec).astype(np.float16)
            read = replace(read, vectors=vectors)
        return read

    def read_tokens(
        self, halves: bytes | None, codes: bytes | None, spec: EncodingSpec
    ) -> npt.NDArray[np.floating[Any]]:
        """Return the token vectors [t, width] of a row's two columns. Raise CodebookMissing."""
        if halves is not None:
            return read_vectors(halves, spec.token_dimensions)
        assert codes is not None, "a row has halves or codes"
        return restore(codes, self.codebook)

    def make_fields(
        self, results: Results, spec: EncodingSpec, find_oid: FindOid
    ) -> Mapping[str, Sequence[Field]]:
        rows = [unpack(packed) for packed in results]
        fields: dict[str, Sequence[Field]] = {}
        if spec.has_output(DENSE):
            dense = np.array([row.dense for row in rows], np.float32).reshape(len(rows), spec.dimensions)
            fields["embedding"] = send_rows(dense, spec.kept_type, spec.dimensions)
        if spec.has_output(SPARSE):
            fields["sparse"] = [send_sparse(row.indices, row.weights, spec.sparse_dimensions) for row in rows]
        if spec.has_output(MULTI_VECTOR):
            oid = find_oid(HALVES)
            if self.codebook is not None and self.writes_codes:
                fields["multi_vector"] = [None] * len(rows)
                fields[CODES] = self.codebook.encode([row.vectors for row in rows])
            else:
                fields["multi_vector"] = [send_vectors(row.vectors, oid) for row in rows]
                fields[CODES] = [None] * len(rows)
        return fields

    def keep(
        self, found: Mapping[int, bytes], spec: EncodingSpec
    ) -> tuple[Mapping[int, bytes], Mapping[int, ItemFailure]]:
        """Fail those whose dense vector does not fit, or that have more weights than a sparsevec can have."""
        kept, failures = {}, {}
        for item, packed in found.items():
            row = unpack(packed)
            if unfit := find_vector_failures(row.dense[np.newaxis], spec.kept_type):
                failures[item] = unfit[0]
            elif len(row.indices) > MAX_WEIGHTS:
                failures[item] = ItemFailure(
                    TOO_MANY_WEIGHTS,
                    f"it has {len(row.indices):,} weights, and a sparsevec of Postgres at most {MAX_WEIGHTS:,}; use a "
                    "smaller max_tokens",
                )
            else:
                kept[item] = packed
        return kept, failures

    def measure(self, results: Results) -> int:
        # `super()` does not know the class that slots make.
        return 6 * Objects.measure(self, results)  # a packed number has six times as many digits

    def write(self, results: Results, spec: EncodingSpec) -> list[Parts]:
        """Return a field for each output, in the order of OUTPUTS."""
        return [write_representations(unpack(packed), spec) for packed in results]

    def arrow_fields(self, spec: EncodingSpec) -> list[Any]:
        import pyarrow as pa

        # A weight of a sparse vector and its place in the vocabulary, from 0.
        weight = pa.struct(
            [pa.field("index", pa.uint32(), nullable=False), pa.field("weight", pa.float32(), nullable=False)]
        )
        fields = {
            DENSE: pa.field("embedding", list_type(spec)),
            SPARSE: pa.field("sparse", pa.list_(weight)),
            MULTI_VECTOR: pa.field("multi_vector", pa.list_(pa.list_(pa.float16(), spec.token_dimensions))),
        }
        return [fields[name] for name in OUTPUTS if spec.has_output(name)]

    def arrow_arrays(self, results: Results, spec: EncodingSpec) -> list[Any]:
        import pyarrow as pa

        rows = [unpack(packed) for packed in results]
        kinds = {field.name: field.type for field in self.arrow_fields(spec)}

        def offsets(counts: Iterable[int]) -> Any:
            return pa.array(np.cumsum([0, *counts]), pa.int32())

        arrays = []
        if spec.has_output(DENSE):
            arrays.append(make_lists(np.array([row.dense for row in rows], np.float32), spec))
        if spec.has_output(SPARSE):
            weights = pa.StructArray.from_arrays(
                [
                    pa.array(np.concatenate([NO_INDICES, *(row.indices for row in rows)])),
                    pa.array(np.concatenate([NO_NUMBERS, *(row.weights for row in rows)])),
                ],
                fields=list(kinds["sparse"].value_type),
            )
            bounds = offsets(len(row.indices) for row in rows)
            arrays.append(pa.ListArray.from_arrays(bounds, weights, kinds["sparse"]))
        if spec.has_output(MULTI_VECTOR):
            halves = np.concatenate([np.zeros(0, np.float16), *(row.vectors.reshape(-1) for row in rows)])
            vectors = pa.FixedSizeListArray.from_arrays(
                pa.array(halves), type=kinds["multi_vector"].value_type
            )
            bounds = offsets(len(row.vectors) for row in rows)
            arrays.append(pa.ListArray.from_arrays(bounds, vectors, kinds["multi_vector"]))
        return arrays

    def loaded(self, spec: EncodingSpec) -> list[LoadedColumn]:
        """Raise InvalidOption."""
        raise InvalidOption(
            f"This output has {spec.outputs}, and a load into Postgres takes dense vectors, scores or records. Load it "
            "into LanceDB, or give the job a collection, which is a view of Postgres."
        )

    def scan(self, spec: EncodingSpec) -> tuple[str, dict[str, Any]]:
        return scan_dense(spec)

    def compare(
        self, kept: Results, now: Results, spec: EncodingSpec, ranges: Ranges | None, tolerance: float
    ) -> dict[str, npt.NDArray[np.floating[Any]]]:
        """Return how well each output agrees: see measure_agreement."""
        measured = [
            measure_agreement(unpack(one), unpack(other)) for one, other in zip(kept, now, strict=True)
        ]
        return {name: np.array([each[name] for each in measured]) for name in spec.outputs.split(",")}

    def least_agreement(self, spec: EncodingSpec) -> float:
        return LEAST_AGREEMENT


def write_representations(row: Representations, spec: EncodingSpec) -> Parts:
    """Return the JSON of the spec's outputs as parts of an object: a comma, a name and a value for each."""
    parts: Parts = []
    if spec.has_output(DENSE):
        dense = row.dense.astype(spec.delivered_type.row)
        parts += b',"embedding":[', _write_numbers(dense[np.newaxis])
    if spec.has_output(SPARSE):
        indices = msgspec.json.encode(row.indices.tolist())
        weights = _write_numbers(row.weights[np.newaxis]) if len(row.weights) else b"]"
        parts += b',"sparse":{"indices":', indices, b',"weights":[', weights, b"}"
    if spec.has_output(MULTI_VECTOR):
        parts += b',"multi_vector":[', write_vectors(row.vectors), b"]"
    return parts


def write_vectors(vectors: Results) -> bytes:
    """Return the JSON of vectors [n, d], separated by commas."""
    written: Iterable[Any] = NUMBER_FORMATS[vectors.dtype].write(vectors) if len(vectors) else ()
    return b",".join(b"[" + bytes(vector) for vector in written)


def _write_numbers(rows: Results) -> memoryview:
    """Return the JSON of the only row of numbers [1, n], ended by "]"."""
    written: memoryview = NUMBER_FORMATS[rows.dtype].write(rows)[0].data
    return written
