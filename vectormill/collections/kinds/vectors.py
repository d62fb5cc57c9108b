"""Vectors: one column of pgvector's types, in the numbers of the spec's vector type."""

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import Cursor, sql

from vectormill.collections.kinds.row_kind import KEPT_TEXT, Column, Results
from vectormill.db.parameters import WireArray, find_type, open_array
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import VECTOR
from vectormill.vectors.vector_types import (
    VectorType,
    choose_vector_type,
    missing_rows,
    read_columns,
    write_columns,
)


class Vectors:
    """Implements RowKind. By default of halfvec: a 768-d row stays inline in its page, and WAL is halved."""

    result = VECTOR
    text_columns = KEPT_TEXT

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (Column("embedding", kept_type(spec).column, spec.dimensions),)

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        return (sql.SQL("live.embedding"),)

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return send_numbers(f"{table}.embedding", spec)

    def gathered(self, sent: str) -> str:
        return f"string_agg({sent}, '')"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        return read_columns(bytes(wire), kept_type(spec), spec.dimensions)

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return missing_rows(num_rows, kept_type(spec), spec.dimensions)

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        return kept_type(spec).column_bytes(spec.dimensions)

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        return {"embedding": make_numbers(cursor, results, spec)}


def kept_type(spec: EncodingSpec) -> VectorType:
    return choose_vector_type(spec, in_collection=True)


def send_numbers(column: str, spec: EncodingSpec) -> str:
    """Return the expression for a column's numbers as pgvector sends them and COPY takes them."""
    return f"{kept_type(spec).column}_send({column})"


def make_numbers(cursor: Cursor[Any], rows: Results, spec: EncodingSpec) -> WireArray:
    """Rows [n, width] as an array of the column's type."""
    kind = kept_type(spec)
    array, elements = open_array(
        find_type(cursor, kind.column), len(rows), kind.column_bytes(spec.dimensions)
    )
    write_columns(elements, rows, kind, spec.dimensions)
    return array
