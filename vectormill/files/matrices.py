"""Matrices: write vectors as a NumPy file, with the keys of its rows in a second file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vectormill.files.parquet import open_parquet

if TYPE_CHECKING:
    import pyarrow


def write_matrix(vectors: Path, matrix: BinaryIO, keys: BinaryIO) -> None:
    """Convert a Parquet file of `key` and `embedding` to a .npy matrix [rows, width], and a file of keys.

    Line i of the keys file is the key of row i, as a JSON string, since a key may contain a line break. One batch of
    rows is in memory at a time.
    """
    with vectors.open("rb") as opened, open_parquet(opened) as file:
        is_first = True
        for batch in file.iter_batches(["key", "embedding"]):
            rows = take_vectors(batch)
            if is_first:
                write_header(matrix, file.num_rows, rows.shape[1], rows.dtype)
                is_first = False
            matrix.write(rows.tobytes())
            keys.write(b"".join(json.dumps(key).encode() + b"\n" for key in batch.column("key").to_pylist()))
        if is_first:
            write_header(matrix, 0, 0, np.dtype("<f4"))


def take_vectors(rows: "pyarrow.RecordBatch") -> npt.NDArray[Any]:
    """Return the vectors of rows as a matrix [rows, width] of their own type."""
    column = rows.column("embedding")
    matrix: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
    return matrix.reshape(rows.num_rows, column.type.list_size)


def write_header(file: BinaryIO, num_rows: int, width: int, number: "np.dtype[Any]") -> None:
    """Write the header of a .npy file [num_rows, width]."""
    header = {"descr": number.str, "fortran_order": False, "shape": (num_rows, width)}
    np.lib.format.write_array_header_1_0(file, header)
