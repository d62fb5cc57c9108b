"""The types in which a finished vector is stored, and their conversion to and from Postgres' binary format.

A row is what a client receives: float32 [d], float16 [d], int8 [d], or uint8 [d / 8 rounded up] of packed
bits.

On the wire `vector` and `halfvec` are int16 dimensions, int16 zero, then big-endian float32 or float16
(pgvector, src/vector.c and src/halfvec.c); `bit` is int32 length, then bytes, the first value in the highest
bit (PostgreSQL, varbit.c).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32, INT8, EncodingSpec
from vectormill.domain.task import REPRESENTATIONS, VECTOR
from vectormill.vectors.quantization import Ranges, pack_signs, quantize

# Rows [n, width] of one of the four types.
Rows = npt.NDArray[Any]

# The largest finite float16; a component beyond it would make COPY reject the whole chunk.
MAX_HALF: Final = 65504.0
# The largest number that float16 rounds to 0.
LARGEST_ZERO: Final = 2.0**-25


@dataclass(frozen=True, slots=True)
class VectorType:
    """One vector type.

    `column` is its SQL type, `row` the dtype of a row, `wire` the dtype in a column's binary form.
    """

    name: str
    column: str
    row: str
    wire: str

    def width(self, dimensions: int) -> int:
        """Return the number of values in a row."""
        return (dimensions + 7) // 8 if self.name == BINARY else dimensions

    def header(self, dimensions: int) -> bytes:
        """Return the four bytes that precede the values in a column's binary form."""
        return dimensions.to_bytes(4) if self.name == BINARY else dimensions.to_bytes(2) + bytes(2)

    def column_bytes(self, dimensions: int) -> int:
        """Return the size in bytes of one vector in the binary format of COPY, its header included."""
        return len(self.header(dimensions)) + self.width(dimensions) * np.dtype(self.wire).itemsize

    @property
    def has_nan(self) -> bool:
        """Return True if a row of this type can mark a missing vector by NaN."""
        return self.name in (FLOAT32, FLOAT16)


VECTOR_TYPE_BY_NAME: Final[Mapping[str, VectorType]] = {
    kind.name: kind
    for kind in (
        VectorType(FLOAT32, "vector", "<f4", ">f4"),
        VectorType(FLOAT16, "halfvec", "<f2", ">f2"),
        # pgvector has no 8-bit type; a float16 represents every code exactly, and SQL can compute with it.
        VectorType(INT8, "halfvec", "i1", ">f2"),
        VectorType(BINARY, "bit", "u1", "u1"),
    )
}


def choose_vector_type(spec: EncodingSpec, *, in_collection: bool) -> VectorType:
    """Return the requested type; by default float16 in a collection and float32 alongside a job's chunks.

    Scores are float32 everywhere.
    """
    is_halved = in_collection and spec.result in (VECTOR, REPRESENTATIONS)
    return VECTOR_TYPE_BY_NAME[spec.vector_type or (FLOAT16 if is_halved else FLOAT32)]


def find_unfit(
    vectors: npt.NDArray[np.float32], kind: VectorType = VECTOR_TYPE_BY_NAME[FLOAT32]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which rows of [n, d] are infinite in this type, in a value or in their length, or NaN; and which are zero.

    Other rows have a direction. A row whose squares fit in float32 is nearly always fine, and tested no further.
    """
    least, most = (LARGEST_ZERO, MAX_HALF) if kind.name == FLOAT16 else (0.0, np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("ij,ij->i", vectors, vectors)
    if kind.name != FLOAT16 or ((squares > least) & (squares <= most)).all():
        return ~(squares <= most) | np.isinf(squares), squares <= least
    largest = np.abs(vectors).max(axis=1, initial=0)
    return ~(largest <= most), largest <= least


def make_rows(vectors: npt.NDArray[np.float32], kind: VectorType, ranges: Ranges | None) -> Rows:
    """Return rows [n, width] of finite float32 vectors [n, d]; int8 needs `ranges`.

    Values for float16 must be within ±65504.
    """
    if kind.name == BINARY:
        return pack_signs(vectors)
    if kind.name == INT8:
        assert ranges is not None, "codes mean nothing without their ranges"
        return quantize(vectors, ranges)
    return vectors.astype(kind.row, copy=False)


def make_column_rows(vectors: npt.NDArray[np.float32], kind: VectorType, ranges: Ranges | None) -> Rows:
    """Return rows for `write_columns` that give the same columns as those of `make_rows`.

    For float16 they stay float32, which is rounded while it is written.
    """
    return vectors if kind.has_nan else make_rows(vectors, kind, ranges)


def missing_rows(num_rows: int, kind: VectorType, dimensions: int) -> Rows:
    """Return rows for items without a vector: NaN, or zeros for types without NaN."""
    return np.full((num_rows, kind.width(dimensions)), np.nan if kind.has_nan else 0, dtype=kind.row)


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
    if kind.has_nan:
        return rows.astype(kind.row, copy=False).tobytes()
    records = np.empty(len(rows), dtype=_record(kind, rows.shape[1]))
    records["present"], records["values"] = present, rows
    return records.tobytes()


def read_block(
    content: bytes, kind: VectorType, num_items: int, dimensions: int
) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return the rows [num_items, width] of a chunk's block, and bool [num_items]: True with a vector."""
    if kind.has_nan:
        rows: Rows = np.frombuffer(content, dtype=kind.row).reshape(num_items, dimensions)
        return rows, ~np.isnan(rows[:, 0])
    records = np.frombuffer(content, dtype=_record(kind, kind.width(dimensions)))
    return records["values"], records["present"].astype(np.bool_)


def measure_item(kind: VectorType, dimensions: int) -> int:
    """Return the number of bytes of one item in a block."""
    width = kind.width(dimensions)
    return width * np.dtype(kind.row).itemsize if kind.has_nan else _record(kind, width).itemsize


def _record(kind: VectorType, width: int) -> "np.dtype[np.void]":
    return np.dtype([("present", "u1"), ("values", kind.row, (width,))])
