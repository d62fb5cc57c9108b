"""Parameters of statements: values of jsonb, and arrays and rows of COPY in PostgreSQL's binary formats.

A whole chunk is sent as a few arrays, without Python code for each row.

Source of arrays: array_recv in PostgreSQL's src/backend/utils/adt/arrayfuncs.c. The header is five int32: the number of
dimensions, whether there are nulls, the type's OID, the number of elements and the index of the first one.
Each element follows as its length and its bytes.

Source of rows: PostgreSQL, "COPY", section "Binary Format". After a signature, flags and the length of an extension
comes each row: the number of fields in int16, then each field as its length in int32 and its bytes, with the length -1
for NULL. At the end stands an int16 of -1.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from psycopg import Connection, Cursor
    from psycopg.adapt import Dumper

# A function that returns the OID of a type of this database by its name.
FindOid = Callable[[str], int]

TEXT_OID: Final = 25
BYTEA_OID: Final = 17
INT8_OID: Final = 20
BUILT_IN: Final = {"text": TEXT_OID, "bytea": BYTEA_OID, "float4": 700, "jsonb": 3802}
# The binary format of jsonb is a version byte and then text (PostgreSQL, jsonb_recv in src/backend/utils/adt/jsonb.c).
JSONB_VERSION: Final = b"\x01"
_LENGTH_BYTES: Final = 4
_HEADER_BYTES: Final = 20
_NULL: Final = -1


@dataclass(frozen=True, slots=True)
class WireArray:
    """An array in binary format as one parameter; the statement casts it, as in `CAST(%(keys)s AS text[])`."""

    content: bytes | memoryview


def accept_arrays(context: "Cursor[Any] | Connection[Any]") -> None:
    """Register WireArray as a parameter type for this cursor, or for all cursors of this connection."""
    context.adapters.register_dumper(WireArray, _make_dumper())


@cache
def _make_dumper() -> "type[Dumper]":
    # A client that reads an output needs the formats here, but has no psycopg.
    from psycopg.adapt import Dumper
    from psycopg.pq import Format

    class WireArrayDumper(Dumper):
        """A psycopg dumper that sends a WireArray unchanged; the server infers its type from the statement."""

        format = Format.BINARY
        oid = 0

        def dump(self, obj: WireArray) -> bytes | memoryview:
            return obj.content

    return WireArrayDumper


def find_type(cursor: "Cursor[Any]", name: str) -> int:
    """Return the OID of a type, which for those of extensions differs between databases; 0 if it does not exist."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    row = cursor.execute("SELECT to_regtype(%(name)s::text)::oid::bigint", {"name": name}).fetchone()
    assert row is not None
    return int(row[0] or 0)


def make_bytes_array(oid: int, values: Sequence[bytes], *, empty_is_null: bool = False) -> WireArray:
    """Return an array of values whose binary form is their bytes, such as text (in UTF-8) or bytea.

    With `empty_is_null` an empty value becomes NULL.
    """
    lengths = np.fromiter(map(len, values), dtype=">i4", count=len(values))
    is_null = (lengths == 0) & empty_is_null
    lengths[is_null] = _NULL
    elements = chain.from_iterable(zip(lengths.view("V4").tolist(), values, strict=True))
    return WireArray(b"".join((_header(oid, len(values), has_null=bool(is_null.any())), *elements)))


def make_places_array(places: Sequence[int]) -> WireArray:
    """Return positions in the order of writers as an array of bigint."""
    array, elements = open_array(INT8_OID, len(places), 8)
    elements[:] = np.array(places, dtype=">i8").view(np.uint8).reshape(-1, 8)
    return array


def open_array(oid: int, num_elements: int, element_bytes: int) -> tuple[WireArray, npt.NDArray[np.uint8]]:
    """Return an array of fixed-length elements, and a view [num_elements, element_bytes] to write them to."""
    content = np.empty(_HEADER_BYTES + num_elements * (_LENGTH_BYTES + element_bytes), dtype=np.uint8)
    content[:_HEADER_BYTES] = np.frombuffer(_header(oid, num_elements), dtype=np.uint8)
    elements = content[_HEADER_BYTES:].reshape(num_elements, _LENGTH_BYTES + element_bytes)
    elements[:, :_LENGTH_BYTES] = np.frombuffer(element_bytes.to_bytes(_LENGTH_BYTES), dtype=np.uint8)
    return WireArray(content.data), elements[:, _LENGTH_BYTES:]


def make_row(fields: Sequence[tuple[int, bytes]]) -> bytes:
    """Return a SQL row of fields, each with the OID of its type and its bytes, in binary form.

    Source: record_recv in PostgreSQL's src/backend/utils/adt/rowtypes.c: the number of fields in int32, and for each
    field the OID of its type, its length, and its bytes.
    """
    parts = [len(fields).to_bytes(4)]
    for oid, content in fields:
        parts += (oid.to_bytes(4), len(content).to_bytes(4), content)
    return b"".join(parts)


def split_row(row: bytes) -> list[bytes | None]:
    """Return the fields of a SQL row in binary form; None for NULL."""
    fields: list[bytes | None] = []
    place = 4
    for _ in range(int.from_bytes(row[:4])):
        start = place + 2 * _LENGTH_BYTES
        length = int.from_bytes(row[start - _LENGTH_BYTES : start], signed=True)
        place = start + max(length, 0)
        fields.append(None if length == _NULL else row[start:place])
    return fields


def _header(oid: int, num_elements: int, *, has_null: bool = False) -> bytes:
    return np.array([1, has_null, oid, num_elements, 1], dtype=">i4").tobytes()


def to_jsonb(value: Any) -> str:
    """Return the JSON text of a value, for a parameter that the statement casts to jsonb."""
    return json.dumps(value, separators=(",", ":"))


# The bytes of a value in Postgres' binary format; None for NULL.
Field = bytes | None

_START: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END: Final = b"\xff\xff"


def encode_rows(columns: Sequence[Sequence[Field]]) -> bytes:
    """Return the content of a binary COPY with these columns of equally many fields."""
    num_rows = len(columns[0])
    parts: list[Iterable[bytes]] = [repeat(len(columns).to_bytes(2), num_rows)]
    for fields in columns:
        values = [field or b"" for field in fields]
        lengths = np.fromiter(map(len, values), dtype=">i4", count=num_rows)
        if None in fields:
            lengths[[field is None for field in fields]] = _NULL
        parts += lengths.view("V4").tolist(), values
    return b"".join((_START, *chain.from_iterable(zip(*parts, strict=True)), _END))
