import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from msgspec import Raw

from vectormill.domain.errors import InvalidItem
from vectormill.jobs.item import LONE_SURROGATE, find_text_failure
from vectormill.rows.columns import Columns
from vectormill.rows.inputs import LOOKED_AT, RowReading, look_at_texts, read_texts

STRICT = RowReading(is_strict=True)

ROWS: list[dict[str, Any]] = [
    {"key": "a", "text": "one"},
    {"key": "b", "text": 'Zwei, "drei"\nvier\u2028fünf'},
]
EXPECTED = [{"key": "a", "text": "one"}, {"key": "b", "text": 'Zwei, "drei"\nvier\u2028fünf'}]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    content = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    delimiter = "\t" if ".tsv" in path.name else ","
    lines = [delimiter.join(rows[0])]
    for row in rows:
        lines.append(delimiter.join('"' + str(cell).replace('"', '""') + '"' for cell in row.values()))
    content = "\r\n".join(lines).encode("utf-8-sig")  # as spreadsheets write it
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


WRITERS = {
    "in.jsonl": write_jsonl,
    "in.ndjson": write_jsonl,
    "in.jsonl.gz": write_jsonl,
    "IN.JSONL": write_jsonl,
    "in.v2.csv": write_csv,
    "in.csv.gz": write_csv,
    "in.tsv": write_csv,
    "in.parquet": write_parquet,
}


def test_every_kind_of_file_gives_the_same_items_and_can_be_read_twice(tmp_path: Path) -> None:
    for name in WRITERS:
        WRITERS[name](tmp_path / name, ROWS)
        items = read_texts(str(tmp_path / name))
        assert list(items) == EXPECTED
        assert list(items) == EXPECTED


def test_fields_can_be_named(tmp_path: Path) -> None:
    for name in ["in.jsonl", "in.csv", "in.parquet"]:
        rows = [{"doi": "10/1", "id": 3, "abstract": "one"}]
        {"in.jsonl": write_jsonl, "in.csv": write_csv, "in.parquet": write_parquet}[name](
            tmp_path / name, rows
        )
        items = read_texts(str(tmp_path / name), RowReading(Columns(key="doi", text="abstract")))
        assert list(items) == [{"key": "10/1", "text": "one"}]


def test_the_key_is_key_or_id_or_the_line(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "7": {"id": 7, "text": "x"},  # a database's number
        "k": {"key": "k", "id": 7, "text": "x"},
        "1": {"text": "x"},  # the line
    }
    for key, row in rows.items():
        write_jsonl(tmp_path / "in.jsonl", [row])
        assert [item["key"] for item in read_texts(str(tmp_path / "in.jsonl"))] == [key]


def test_metadata_goes_along_and_other_fields_stay_behind(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"key": "a", "text": "x", "metadata": {"page": 1}, "title": "t"}])
    assert list(read_texts(str(tmp_path / "in.jsonl"))) == [
        {"key": "a", "text": "x", "metadata": Raw(b'{"page":1}')}
    ]


def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path) -> None:
    misnamed = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), misnamed, store_schema=False)
    for name, content, sentence in [
        ("in.jsonl", b'{"text": "x"}\n{"text"\n', "in.jsonl, line 2: not valid JSON"),
        ("in.jsonl", b'{"text": "x"}\n\n[1]\n', "in.jsonl, line 3: expected a JSON object"),
        ("in.jsonl", b'{"text": "\xff"}\n', "in.jsonl, line 1: not valid UTF-8 (byte 1 of the text)."),
        ("in.jsonl", b'{"txt": "x"}\n', "in.jsonl has no column 'text'; its columns are 'txt'."),
        ("in.jsonl", b'{"key": null, "text": "x"}\n', "line 1: the key is null; every row needs a key."),
        ("in.jsonl", '{"text": "x"}'.encode("utf-16"), "in.jsonl is UTF-16 text. Save it as UTF-8"),
        ("in.csv", "text".encode("utf-16-le"), "in.csv is UTF-16 text"),
        ("in.csv", b"key,text,text\na,b,c\n", "in.csv has several columns 'text'; rename all but one"),
        ("in.csv", b"", "in.csv is empty; its first line should name the columns."),
        (
            "in.jsonl",
            b'{"key": 1.5, "text": "x"}\n',
            "line 1: the key must be text or a whole number; got",
        ),
        (
            "in.jsonl",
            b'{"key": true, "text": "x"}\n',
            "line 1: the key must be text or a whole number; got",
        ),
        ("in.jsonl", b"[" * 100_000, "line 1: the JSON is nested too deeply."),
        ("in.jsonl.gz", b"no gzip", "in.jsonl.gz is not a complete gzip file"),
        (
            "in.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-9],
            "in.jsonl.gz is not a complete gzip file",
        ),
        (
            "in.jsonl.zst",
            zstandard.compress(b'{"text": "x"}\n' * 1000)[:-9],
            "in.jsonl.zst is not a complete zstd file",
        ),
        ("in.csv.zst", b"no zstd", "in.csv.zst is not a complete zstd file"),
        ("in.csv", b"key,text\na,b\nc\n", "in.csv, line 3: the row has 1 cells, but the header has 2."),
        ("in.csv", b"key,text\na,b,c\n", "in.csv, line 2: the row has 3 cells, but the header has 2."),
        (
            "in.csv",
            b"key,words\na,b\n",
            "in.csv has no column 'text'; its columns are 'key', 'words'.",
        ),
        ("in.csv", b'key,text\na,"b"c\n', "in.csv, in the row that begins at line 2:"),
        ("in.csv", b"key,text\na,\xff\n", "in.csv, line 2: not valid UTF-8"),
        ("in.csv.gz", b"no gzip", "in.csv.gz is not a complete gzip file"),
        ("in.parquet", b"no parquet", "in.parquet cannot be read as Parquet"),
        ("in.parquet", misnamed.getvalue().replace(b"text", b"te\xff\xff"), "cannot be read as Parquet"),
        ("in.txt", b"x", "Unknown format of "),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidItem) as caught:
            list(read_texts(str(tmp_path / name), STRICT))
        assert sentence in str(caught.value)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidItem, match=r"There is no file .*missing\.jsonl"):
        read_texts(str(tmp_path / "missing.jsonl"))


def test_a_long_cell_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("key,text\na," + "x" * 1_000_000)
    assert [len(item["text"]) for item in read_texts(str(tmp_path / "in.csv"))] == [1_000_000]


def test_standard_input_is_json_lines_and_can_be_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b'\xef\xbb\xbf{"key": "a", "text": "one"}\n{"key": "b", "text": "two"}')

    monkeypatch.setattr(sys, "stdin", Stdin)
    items = read_texts("-")
    assert iter(items) is items
    assert list(items) == [{"key": "a", "text": "one"}, {"key": "b", "text": "two"}]


def test_a_directory_gives_its_text_files_by_path(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": "two",
        "a.md": "one",
        "sub/c.txt": "drei",
        ".git/x": "no",
        "sub/.y": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    tree = read_texts(str(tmp_path))
    expected = [("a.md", "one"), ("b.txt", "two"), ("sub/c.txt", "drei")]
    assert [(item["key"], item["text"]) for item in tree] == expected
    assert [(item["key"], item["text"]) for item in tree] == expected


NOT_UTF8 = {
    "in.jsonl": b'{"key": "a", "text": "x"}\n{"key": "b", "text": "caf\xe9"}\n{"key": "c", "text": "y"}\n',
    "in.csv": b"key,text\na,x\nb,caf\xe9\nc,y\n",
}


def test_a_row_that_is_not_utf8_travels_alone_to_where_items_are_reported(tmp_path: Path) -> None:
    for name in NOT_UTF8:
        (tmp_path / name).write_bytes(NOT_UTF8[name])
        texts = {item["key"]: item["text"] for item in read_texts(str(tmp_path / name))}
        assert texts == {"a": "x", "b": "caf\udce9", "c": "y"}
        failure = find_text_failure(texts["b"].encode("utf-8", "surrogatepass"), max_chars=100)
        assert failure is not None
        assert failure.code == LONE_SURROGATE


def test_a_file_that_is_not_utf8_travels_to_its_first_bad_byte_and_leaves_its_neighbours_be(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "photo.png").write_bytes(b"PNG\x89" + bytes(range(256)) * 1000)
    items = [(item["key"], item["text"]) for item in read_texts(str(tmp_path))]
    assert items == [("a.txt", "one"), ("photo.png", "PNG\udc89")]
    (tmp_path / "wide.txt").write_bytes("wide".encode("utf-16-le"))
    assert find_text_failure(list(read_texts(str(tmp_path)))[2]["text"].encode(), 100)
    with pytest.raises(InvalidItem, match=r"photo\.png is not UTF-8 text \(byte 3\)"):
        list(read_texts(str(tmp_path), STRICT))


def test_a_look_finds_what_is_wrong_at_the_start_and_a_strict_one_what_is_wrong_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = b'{"text": "x"}\n'
    (tmp_path / "in.jsonl").write_bytes(b"{" + good)
    with pytest.raises(InvalidItem, match="line 1"):
        look_at_texts(read_texts(str(tmp_path / "in.jsonl")), whole=False)
    (tmp_path / "in.jsonl").write_bytes(good * LOOKED_AT + b'{"text": "\xff"}\n')
    assert len(list(look_at_texts(read_texts(str(tmp_path / "in.jsonl")), whole=False))) == LOOKED_AT + 1
    with pytest.raises(InvalidItem, match=f"line {LOOKED_AT + 1}"):
        look_at_texts(read_texts(str(tmp_path / "in.jsonl"), STRICT), whole=True)


def test_a_look_at_standard_input_loses_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b'{"text": "x"}\n' * (LOOKED_AT + 5))

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert len(list(look_at_texts(read_texts("-"), whole=True))) == LOOKED_AT + 5


def test_an_empty_directory_is_an_error_because_it_is_the_wrong_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidItem, match="contains no files"):
        list(read_texts(str(tmp_path)))
