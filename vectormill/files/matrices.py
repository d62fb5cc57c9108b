"""Matrices: write vectors as a NumPy file, with the keys of its rows in a second file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vectormill.files.outputs import keys_path, open_replacement
from vectormill.files.parquet import open_parquet

if TYPE_CHECKING:
    import pyarrow


def write_matrix(vectors: Path, matrix: Path) -> int:
    """Convert a Parquet file of `key` and `embedding` to a .npy matrix [rows, width], and return the number of rows.

    Line i of the keys file is the key of row i, as a JSON string, since a key may contain a line break. One batch of
    rows is in memory at a time. The keys file is moved into place first, so that no matrix exists without its keys.
    """
    with (
        vectors.open("rb") as opened,
        open_parquet(opened) as file,
        open_replacement(matrix) as values,
        open_replacement(keys_path(matrix)) as keys,
    ):
        num_rows = file.num_rows
        is_first = True
        for batch in file.iter_batches(["key", "embedding"]):
            rows = take_vectors(batch)
            if is_first:
                write_header(values, num_rows, rows.shape[1], rows.dtype)
                is_first = False
            values.write(rows.tobytes())
            keys.write(b"".join(json.dumps(key).encode() + b"\n" for key in batch.column("key").to_pylist()))
        if is_first:
            write_header(values, 0, 0, np.dtype("<f4"))
    return int(num_rows)


def take_vectors(rows: "pyarrow.RecordBatch") -> npt.NDArray[Any]:
    """Return the vectors of rows as a matrix [rows, width] of their own type."""
    column = rows.column("embedding")
    matrix: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
    return matrix.reshape(rows.num_rows, column.type.list_size)


def write_header(file: BinaryIO, num_rows: int, width: int, number: "np.dtype[Any]") -> None:
    """Write the header of a .npy file [num_rows, width]."""
    header = {"descr": number.str, "fortran_order": False, "shape": (num_rows, width)}
    np.lib.format.write_array_header_1_0(file, header)
