"""Convert finished vectors to rows of their VectorType, and rows to and from Postgres' binary format.

A row is what a client receives: numbers [d] of the type, or uint8 [d / 8 rounded up] of packed bits.

On the wire `vector` and `halfvec` are int16 dimensions, int16 zero, then big-endian float32 or float16
(pgvector, src/vector.c and src/halfvec.c); `bit` is int32 length, then bytes, the first value in the highest
bit (PostgreSQL, varbit.c).
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vectormill.domain.vector_type import DEFAULT_TYPE, VectorType
from vectormill.jobs.item import ITEM_ERROR_CODES, NON_FINITE_VECTOR, ZERO_VECTOR, ItemFailure
from vectormill.vectors.quantization import Ranges, pack_signs, quantize, restore

# Rows [n, width] of a VectorType.
Rows = npt.NDArray[Any]

# The largest finite float16; a component beyond it would make COPY reject the whole chunk.
MAX_HALF: Final = 65504.0
# The largest number that float16 rounds to 0.
LARGEST_ZERO: Final = 2.0**-25


def find_unfit(
    vectors: npt.NDArray[np.float32], kind: VectorType = DEFAULT_TYPE
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which rows of [n, d] are infinite in this type, in a value or in their length, or NaN; and which are zero.

    Other rows have a direction. A row whose squares fit in float32 is nearly always fine, and tested no further.
    """
    least, most = (LARGEST_ZERO, MAX_HALF) if kind.is_half else (0.0, np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("ij,ij->i", vectors, vectors)
    if not kind.is_half or ((squares > least) & (squares <= most)).all():
        return ~(squares <= most) | np.isinf(squares), squares <= least
    largest = np.abs(vectors).max(axis=1, initial=0)
    return ~(largest <= most), largest <= least


def find_vector_failures(
    vectors: npt.NDArray[np.float32], kind: VectorType = DEFAULT_TYPE
) -> dict[int, ItemFailure]:
    """Return the failures of the rows of [n, d] that cannot be compared with others once they are stored so."""
    if not vectors.size:
        return {}
    return {
        row: ItemFailure(code, ITEM_ERROR_CODES[code])
        for code, is_so in zip((NON_FINITE_VECTOR, ZERO_VECTOR), find_unfit(vectors, kind), strict=True)
        for row in np.flatnonzero(is_so).tolist()
    }


def make_rows(vectors: npt.NDArray[np.float32], kind: VectorType, ranges: Ranges | None) -> Rows:
    """Return rows [n, width] of finite float32 vectors [n, d]; codes need `ranges`.

    Values for float16 must be within ±65504.
    """
    if kind.is_packed:
        return pack_signs(vectors)
    if kind.has_ranges:
        assert ranges is not None, "codes mean nothing without their ranges"
        return quantize(vectors, ranges)
    return vectors.astype(kind.row, copy=False)


def make_column_rows(vectors: npt.NDArray[np.float32], kind: VectorType, ranges: Ranges | None) -> Rows:
    """Return rows for `write_columns` that give the same columns as those of `make_rows`.

    For float16 they stay float32, which is rounded while it is written.
    """
    return vectors if kind.is_float else make_rows(vectors, kind, ranges)


def restore_rows(
    rows: Rows, kind: VectorType, ranges: Ranges | None, dimensions: int
) -> npt.NDArray[np.float32]:
    """Return the vectors [n, d] that rows stand for; of packed bits they are 1 and -1."""
    if kind.is_packed:
        bits = np.unpackbits(rows, axis=1)[:, :dimensions]
        return np.where(bits == 1, np.float32(1), np.float32(-1))
    if kind.has_ranges:
        assert ranges is not None, "codes mean nothing without their ranges"
        return restore(rows, ranges)
    return rows.astype(np.float32)


def missing_rows(num_rows: int, kind: VectorType, dimensions: int) -> Rows:
    """Return rows for items without a vector: NaN, or zeros for types without NaN."""
    return np.full((num_rows, kind.width(dimensions)), np.nan if kind.is_float else 0, dtype=kind.row)


def write_columns(columns: npt.NDArray[np.uint8], rows: Rows, kind: VectorType, dimensions: int) -> None:
    """Write rows [n, width] into `columns` [n, kind.column_bytes(dimensions)] in the columns' binary form.

    The values are converted while they are written, without another copy.
    """
    header = kind.header(dimensions)
    columns[:, : len(header)] = np.frombuffer(header, dtype=np.uint8)
    columns[:, len(header) :].view(kind.wire)[:] = rows


def send_rows(rows: Rows, kind: VectorType, dimensions: int) -> list[bytes]:
    """Return rows [n, width] as n columns in binary form."""
    num_bytes = kind.column_bytes(dimensions)
    columns = np.empty((len(rows), num_bytes), dtype=np.uint8)
    write_columns(columns, rows, kind, dimensions)
    return list(columns.view(f"V{num_bytes}").ravel().tolist())


def read_columns(wire: bytes, kind: VectorType, dimensions: int) -> Rows:
    """Return the rows [n, width] of consecutive columns in binary form."""
    column = np.dtype([("header", "V4"), ("values", kind.wire, (kind.width(dimensions),))])
    rows: Rows = np.frombuffer(wire, dtype=column)["values"].astype(kind.row)
    return rows


def pack_block(rows: Rows, present: npt.NDArray[np.bool_], kind: VectorType) -> bytes:
    """Return a chunk's rows [n, width] as one value; items without a vector must have rows of `missing_rows`.

    All items have equally many bytes, so that a block can be split without being parsed. In a type without
    NaN the first byte of an item says whether it has a vector.
    """
    if kind.is_float:
        return rows.astype(kind.row, copy=False).tobytes()
    records = np.empty(len(rows), dtype=_record(kind, rows.shape[1]))
    records["present"], records["values"] = present, rows
    return records.tobytes()


def read_block(
    content: bytes, kind: VectorType, num_items: int, dimensions: int
) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return the rows [num_items, width] of a chunk's block, and bool [num_items]: True with a vector."""
    if kind.is_float:
        rows: Rows = np.frombuffer(content, dtype=kind.row).reshape(num_items, dimensions)
        return rows, ~np.isnan(rows[:, 0])
    records = np.frombuffer(content, dtype=_record(kind, kind.width(dimensions)))
    return records["values"], records["present"].astype(np.bool_)


def measure_item(kind: VectorType, dimensions: int) -> int:
    """Return the number of bytes of one item in a block."""
    width = kind.width(dimensions)
    return width * np.dtype(kind.row).itemsize if kind.is_float else _record(kind, width).itemsize


def _record(kind: VectorType, width: int) -> "np.dtype[np.void]":
    return np.dtype([("present", "u1"), ("values", kind.row, (width,))])
