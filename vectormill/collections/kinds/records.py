"""Records: what was found of each item, by type, as JSON in one column: see vectormill/vectors/records.py."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from psycopg import Cursor, sql

from vectormill.collections.kinds.row_kind import KEPT_TEXT, Column, Results, take_objects
from vectormill.db.parameters import WireArray, make_bytes_array
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RECORD

JSONB_OID: Final = 3802
# jsonb in binary form is a version and then its text (PostgreSQL, jsonb_recv in src/backend/utils/adt/jsonb.c).
JSONB_VERSION: Final = b"\x01"


class Records:
    """Implements RowKind. Results are objects [n], each JSON as bytes that jsonb takes."""

    result = RECORD
    text_columns = KEPT_TEXT

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (Column("output", "jsonb"),)

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        return (sql.SQL("live.output"),)

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"CAST({table}.output AS text)"

    def gathered(self, sent: str) -> str:
        return f"array_agg({sent})"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        texts: list[str] = [wire] if isinstance(wire, str) else wire
        return take_objects([text.encode() for text in texts])

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return take_objects([None] * num_rows)

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        return None

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        return {"output": make_bytes_array(JSONB_OID, [JSONB_VERSION + output for output in results])}
