"""The types in which a finished vector is kept, and how each travels to Postgres and back.

A row is what a client gets: float32 [d], float16 [d], int8 [d], or uint8 [d / 8 rounded up] of packed bits. Pure
functions on arrays; knows nothing of jobs or of statements.

On the wire `vector` and `halfvec` are int16 dimensions, int16 zero, then big-endian float32 or float16 (pgvector,
src/vector.c and src/halfvec.c); `bit` is int32 length, then bytes, the first value in the highest bit (PostgreSQL,
varbit.c).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32, INT8, EncodingSpec
from vectormill.domain.task import VECTOR
from vectormill.vectors.quantization import Ranges, pack_signs, quantize

# Rows [n, width] of one of the four types.
Rows = npt.NDArray[Any]

# The largest finite float16; a component beyond it would make COPY refuse the whole chunk.
MAX_HALF: Final = 65504.0


@dataclass(frozen=True, slots=True)
class VectorType:
    """One vector type. `column` is the SQL type, `row` the dtype in a row, `wire` the dtype in a
    column.
    """

    name: str
    column: str
    row: str
    wire: str

    def width(self, dimensions: int) -> int:
        """Return numbers in a row."""
        return (dimensions + 7) // 8 if self.name == BINARY else dimensions

    def header(self, dimensions: int) -> bytes:
        """Return the four bytes before a column's numbers."""
        return dimensions.to_bytes(4) if self.name == BINARY else dimensions.to_bytes(2) + bytes(2)

    def column_bytes(self, dimensions: int) -> int:
        """Return bytes of a column in binary form."""
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
        # pgvector has no type of 8 bits; a float16 holds every code exactly, and SQL can compute with it.
        VectorType(INT8, "halfvec", "i1", ">f2"),
        VectorType(BINARY, "bit", "u1", "u1"),
    )
}


def choose_vector_type(spec: EncodingSpec, *, in_collection: bool) -> VectorType:
    """Return the type that a job asks for; else float16 in a collection, and float32 beside the job's chunks.

    Numbers of scores are float32 wherever they are.
    """
    is_halved = in_collection and spec.result == VECTOR
    return VECTOR_TYPE_BY_NAME[spec.vector_type or (FLOAT16 if is_halved else FLOAT32)]


def make_rows(vectors: npt.NDArray[np.float32], kind: VectorType, ranges: Ranges | None) -> Rows:
    """Return rows [n, width] of finite float32 [n, d]; `ranges` are needed for int8. float16 needs values within
    ±65504.
    """
    if kind.name == BINARY:
        return pack_signs(vectors)
    if kind.name == INT8:
        assert ranges is not None, "codes mean nothing without their ranges"
        return quantize(vectors, ranges)
    return vectors.astype(kind.row, copy=False)


def make_column_rows(vectors: npt.NDArray[np.float32], kind: VectorType, ranges: Ranges | None) -> Rows:
    """Return rows of which `write_columns` makes the columns that it makes of `make_rows`.

    float16 stays float32, which is rounded while it is written.
    """
    return vectors if kind.has_nan else make_rows(vectors, kind, ranges)


def missing_rows(num_rows: int, kind: VectorType, dimensions: int) -> Rows:
    """Return rows for items without a vector: NaN, or zeros where there is none."""
    return np.full((num_rows, kind.width(dimensions)), np.nan if kind.has_nan else 0, dtype=kind.row)


def write_columns(columns: npt.NDArray[np.uint8], rows: Rows, kind: VectorType, dimensions: int) -> None:
    """Write rows [n, width] into `columns` [n, kind.column_bytes(dimensions)], each as its column in binary form.

    The numbers are converted where they are written: no other copy of them is made.
    """
    header = kind.header(dimensions)
    columns[:, : len(header)] = np.frombuffer(header, dtype=np.uint8)
    columns[:, len(header) :].view(kind.wire)[:] = rows


def read_columns(wire: bytes, kind: VectorType, dimensions: int) -> Rows:
    """Return rows [n, width] out of columns in binary form, one after the other."""
    column = np.dtype([("header", "V4"), ("values", kind.wire, (kind.width(dimensions),))])
    rows: Rows = np.frombuffer(wire, dtype=column)["values"].astype(kind.row)
    return rows


def pack_block(rows: Rows, present: npt.NDArray[np.bool_], kind: VectorType) -> bytes:
    """Return a chunk's rows [n, width] as one value; rows whose item has no vector must be those of `missing_rows`.

    An item has as many bytes as another, so that a block can be cut in two without being read. In a type without NaN
    the first of them says whether there is a vector.
    """
    if kind.has_nan:
        return rows.astype(kind.row, copy=False).tobytes()
    records = np.empty(len(rows), dtype=_record(kind, rows.shape[1]))
    records["present"], records["values"] = present, rows
    return records.tobytes()


def read_block(
    content: bytes, kind: VectorType, num_items: int, dimensions: int
) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return rows [num_items, width] of a chunk, and whether each item has a vector, bool [num_items]."""
    if kind.has_nan:
        rows: Rows = np.frombuffer(content, dtype=kind.row).reshape(num_items, dimensions)
        return rows, ~np.isnan(rows[:, 0])
    records = np.frombuffer(content, dtype=_record(kind, kind.width(dimensions)))
    return records["values"], records["present"].astype(np.bool_)


def measure_item(kind: VectorType, dimensions: int) -> int:
    """Return bytes of one item in a block."""
    width = kind.width(dimensions)
    return width * np.dtype(kind.row).itemsize if kind.has_nan else _record(kind, width).itemsize


def _record(kind: VectorType, width: int) -> "np.dtype[np.void]":
    return np.dtype([("present", "u1"), ("values", kind.row, (width,))])
