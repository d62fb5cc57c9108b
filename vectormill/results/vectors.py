"""The result `vector`: one dense vector for a text, in the spec's vector type."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from vectormill.db.parameters import Field, FindOid, WireArray, open_array
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import DENSE, VECTOR
from vectormill.files.matrices import take_vectors
from vectormill.results.kind import (
    LEAST_AGREEMENT,
    Column,
    LoadedColumn,
    Parts,
    ResultKind,
    Results,
)
from vectormill.vectors.decimals import NUMBER_FORMATS
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.representations import NORM_TOLERANCE, SMALLEST_NORM
from vectormill.vectors.vector_types import (
    missing_rows,
    read_columns,
    restore_rows,
    send_rows,
    write_columns,
)

# Some bits flip whose values are nearly 0.
LEAST_AGREEMENT_OF_BITS: Final = 0.95


SCAN_NORMS: Final = """
    SELECT count(*) AS num_rows,
           count(*) FILTER (WHERE norm IN ('NaN', 'Infinity')) AS num_not_finite,
           count(*) FILTER (WHERE norm = 0) AS num_zero,
           count(*) FILTER (WHERE norm > 0 AND norm < 'Infinity'
                              AND abs(norm - 1) > CAST(:tolerance AS double precision)) AS num_odd_norms,
           min(norm) FILTER (WHERE norm > 0 AND norm < 'Infinity') AS smallest_norm,
           max(norm) FILTER (WHERE norm > 0 AND norm < 'Infinity') AS largest_norm,
           (array_agg(key) FILTER (WHERE norm = 0 OR norm IN ('NaN', 'Infinity')))[1 : CAST(:limit AS integer)]
               AS broken_keys
      FROM (SELECT key, CAST({norm}(embedding) AS double precision) AS norm FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""

COUNT_ROWS: Final = """
    SELECT count(*) AS num_rows, 0 AS num_not_finite, 0 AS num_zero, 0 AS num_odd_norms,
           NULL AS smallest_norm, NULL AS largest_norm, NULL AS broken_keys
      FROM vectormill.{table}
     WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)
"""


class Numbers(ResultKind):
    """Shared code of kinds whose results are numbers [n, width] in one pgvector column of the spec's vector type."""

    column: ClassVar[str]

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"{spec.kept_type.column}_send({table}.{self.column})"  # pgvector's binary format, as in COPY

    def gathered(self, sent: str) -> str:
        return f"string_agg({sent}, '')"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        return read_columns(bytes(wire), spec.kept_type, spec.dimensions)

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return missing_rows(num_rows, spec.kept_type, spec.dimensions)

    def keep_again(self, results: Results) -> Results:
        return np.nan_to_num(results.astype(np.float32))

    def define_numbers(self, spec: EncodingSpec) -> Column:
        return Column(self.column, spec.kept_type.column, spec.dimensions)


class Vectors(Numbers):
    """The ResultKind of vectors."""

    result = VECTOR
    column = "embedding"

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (self.define_numbers(spec),)

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        return spec.kept_type.column_bytes(spec.dimensions)

    def make_arrays(self, results: Results, spec: EncodingSpec, find_oid: FindOid) -> Mapping[str, WireArray]:
        """Encode a whole chunk without Python code for each row."""
        kind = spec.kept_type
        array, elements = open_array(find_oid(kind.column), len(results), kind.column_bytes(spec.dimensions))
        write_columns(elements, results, kind, spec.dimensions)
        return {self.column: array}

    def make_fields(
        self, results: Results, spec: EncodingSpec, find_oid: FindOid
    ) -> Mapping[str, Sequence[Field]]:
        return {self.column: send_rows(results, spec.kept_type, spec.dimensions)}

    def measure(self, results: Results) -> int:
        return NUMBER_FORMATS[results.dtype].slot_bytes * int(results.shape[1])

    def write(self, results: Results, spec: EncodingSpec) -> list[Parts]:
        return [[b',"embedding":[', row.data] for row in NUMBER_FORMATS[results.dtype].write(results)]

    def arrow_fields(self, spec: EncodingSpec) -> list[Any]:
        import pyarrow as pa

        return [pa.field("embedding", list_type(spec))]

    def arrow_arrays(self, results: Results, spec: EncodingSpec) -> list[Any]:
        return [make_lists(results, spec)]

    def loaded(self, spec: EncodingSpec) -> list[LoadedColumn]:
        return [load_dense(spec)]

    def scan(self, spec: EncodingSpec) -> tuple[str, dict[str, Any]]:
        return scan_dense(spec)

    def compare(
        self, kept: Results, now: Results, spec: EncodingSpec, ranges: Ranges | None, tolerance: float
    ) -> dict[str, npt.NDArray[np.floating[Any]]]:
        """Return the cosines, or the shares of equal bits."""
        vectors = restore_rows(kept, spec.kept_type, ranges, spec.dimensions)
        if spec.kept_type.is_packed:
            return {VECTOR: ((vectors > 0) == (now > 0)).mean(axis=1)}
        norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(now, axis=1)
        return {VECTOR: np.einsum("nd,nd->n", vectors, now) / np.maximum(norms, SMALLEST_NORM)}

    def least_agreement(self, spec: EncodingSpec) -> float:
        return LEAST_AGREEMENT_OF_BITS if spec.kept_type.is_packed else LEAST_AGREEMENT


def scan_dense(spec: EncodingSpec) -> tuple[str, dict[str, Any]]:
    """Return the SQL that finds dense vectors without a direction, or of another length than 1 if they are to have it.

    Codes and bits always have one.
    """
    if not spec.has_output(DENSE) or spec.kept_type.norm is None:
        return COUNT_ROWS, {}
    tolerance = NORM_TOLERANCE if spec.normalize else float("inf")
    return SCAN_NORMS.replace("{norm}", spec.kept_type.norm), {"tolerance": tolerance}


def list_type(spec: EncodingSpec) -> Any:
    """Return the Arrow type of dense vectors: lists of fixed size of the requested vector type, else of float32."""
    import pyarrow as pa

    kind = spec.delivered_type
    return pa.list_(pa.from_numpy_dtype(np.dtype(kind.row)), kind.width(spec.dimensions))


def make_lists(rows: Results, spec: EncodingSpec) -> Any:
    """Return rows [n, width] as an Arrow array of `list_type`."""
    import pyarrow as pa

    values = pa.array(rows.astype(np.dtype(spec.delivered_type.row), copy=False).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, type=list_type(spec))


def load_dense(spec: EncodingSpec) -> LoadedColumn:
    """Return the column of dense vectors in a table of another Postgres."""
    kind = spec.delivered_type
    return LoadedColumn(
        "embedding",
        f"{kind.column}({spec.dimensions})",
        lambda rows: send_rows(take_vectors(rows), kind, spec.dimensions),
    )
