import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vectormill.files.ndjson import compress_parts, encode_parts
from vectormill.files.outputs import choose_format, open_replacement, write_vectors
from vectormill.rows.decoding import split_lines

KEYS = ["a", "b\nb", "ü"]
VECTORS = np.arange(6, dtype=np.float32).reshape(3, 2)


def fetch(path: Path, format: str) -> None:
    """What the API would send."""
    if format == "parquet":
        embedding = pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.reshape(-1)), 2)
        pq.write_table(pa.table({"key": KEYS, "embedding": embedding}), path, row_group_size=2)
    else:
        assert format == "ndjson"
        path.write_bytes(b"lines\n")


def test_the_name_of_the_output_tells_its_format() -> None:
    for name, given, expected in [
        ("out.parquet", None, "parquet"),
        ("out.jsonl", None, "ndjson"),
        ("out.v1.NDJSON", None, "ndjson"),
        ("out.npy", None, "npy"),
        ("out.bin", "npy", "npy"),
    ]:
        assert choose_format(Path(name), given) == expected


def test_npy_has_its_keys_beside_it_row_by_row(tmp_path: Path) -> None:
    write_vectors(fetch, tmp_path / "out.npy", "npy")
    loaded = np.load(tmp_path / "out.npy", mmap_mode="r")
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, VECTORS)
    lines = (tmp_path / "out.npy.keys.txt").read_text().splitlines()
    assert [json.loads(line) for line in lines] == KEYS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npy", "out.npy.keys.txt"]


def test_npy_has_the_numbers_that_the_vectors_are_of(tmp_path: Path) -> None:
    for number in [np.float16, np.int8, np.uint8]:
        rows: np.ndarray = np.array([[1, -2, 3], [4, 5, 6]]).astype(number)

        def fetch_rows(path: Path, format: str, rows: "np.ndarray[Any, Any]" = rows) -> None:
            embedding = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 3)
            pq.write_table(pa.table({"key": ["a", "b"], "embedding": embedding}), path)

        write_vectors(fetch_rows, tmp_path / "out.npy", "npy")
        loaded = np.load(tmp_path / "out.npy")
        assert loaded.dtype == np.dtype(number)
        np.testing.assert_array_equal(loaded, rows)


def test_npy_of_no_vectors_is_an_empty_matrix(tmp_path: Path) -> None:
    def fetch_nothing(path: Path, format: str) -> None:
        schema = pa.schema({"key": pa.string(), "embedding": pa.list_(pa.float32(), 2)})
        pq.write_table(schema.empty_table(), path)

    write_vectors(fetch_nothing, tmp_path / "out.npy", "npy")
    assert np.load(tmp_path / "out.npy").shape[0] == 0


def test_a_fetch_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    for format in ["ndjson", "parquet", "npy"]:

        def break_off(path: Path, format: str) -> None:
            with open_replacement(path) as file:
                file.write(b"half")
                raise ConnectionError

        (tmp_path / "out").write_text("before")
        with pytest.raises(ConnectionError):
            write_vectors(break_off, tmp_path / "out", format)
        assert (tmp_path / "out").read_text() == "before"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_private_file_is_the_user_s_alone_while_it_is_written(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open_replacement(tmp_path / "new", is_private=True):
            (part,) = tmp_path.glob(".vectormill-*")
            assert stat.S_IMODE(part.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_lines_end_at_newlines_only_wherever_the_parts_are_cut() -> None:
    content = "a\u2028b\r\nc\u0085d\n\nlast".encode()
    for cut in range(len(content)):
        parts = [content[:cut], content[cut:]]
        assert list(split_lines(parts)) == ["a\u2028b\r".encode(), "c\u0085d".encode(), b"", b"last"]


def test_parts_are_about_as_large_as_asked_for() -> None:
    parts = list(encode_parts(({"key": str(i), "text": "x" * 90} for i in range(1000)), part_bytes=1000))
    assert all(1000 <= len(part) < 1200 for part in parts[:-1])
    assert len(b"".join(parts).splitlines()) == 1000


def test_compressed_parts_are_one_gzip_stream() -> None:
    import gzip

    parts = [os.urandom(1000), b"", b"x" * 100_000]
    compressed = b"".join(compress_parts(parts))
    assert gzip.GzipFile(fileobj=io.BytesIO(compressed)).read() == b"".join(parts)
