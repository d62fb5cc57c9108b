"""Rows as the libraries give them that everybody uses: csv, json and pyarrow, whole and cut by reference.

The hostile tables that Hypothesis draws are the specification of vectormill/rows: each way in gives the rows of the
library that wrote them, and all ways in give the same items.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from uuid import UUID

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.protocol import SPEC
from vectormill.client.frames import read_items
from vectormill.domain.errors import InvalidItem, SubmissionTooLarge, VectormillError
from vectormill.files.formats import InputName
from vectormill.files.ndjson import encode_line
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import TokenEstimate
from vectormill.jobs.item import Item, Items, find_side_failure
from vectormill.objects import reading
from vectormill.objects.reading import ChunkLimits, cut_object
from vectormill.objects.store import find_objects
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import DELIMITERS, RowBatch, read_lines_of, read_rows
from vectormill.rows.inputs import RowReading, read_texts, to_json
from vectormill.rows.items import Assembler
from vectormill.rows.values import encode_metadata, make_plain, spell_key

COLUMNS = Columns("text", "key", metadata=("page",))
Rows = list[dict[str, Any]]

# These characters break parsers of lines: quotes, separators, every kind of line break, and others taken for one.
hostile = st.text(st.sampled_from(list('",;\t\n\r ab\u2028\x85\x0b\x1cé\U0001f600\ufeff')), max_size=8)
raw_tables = st.lists(
    st.sampled_from([b'"', b",", b"\t", b"\n", b"\r", b"\r\n", b"a", b'""', b" ", b"\xff"]), max_size=30
)
block_sizes = st.integers(1, 40)


def divide(content: bytes, size: int) -> Iterator[bytes]:
    return (content[start : start + size] for start in range(0, len(content), size))


def flatten(batches: Iterator[RowBatch]) -> Rows:
    """Return the rows of batches, and check that they are numbered and placed in order."""
    rows: Rows = []
    last, position = 0, 0
    for batch in batches:
        for place, number in enumerate(batch.numbers):
            assert number > last
            last = number
            if batch.ends:
                assert batch.ends[place] > position
                position = batch.ends[place]
            rows.append({name: values[place] for name, values in batch.columns.items()})
    return rows


def try_to(read: Callable[[], Rows], *errors: type[Exception]) -> Rows | str:
    try:
        return read()
    except errors:
        return "refused"


def read_by_csv(content: bytes, delimiter: str) -> Rows:
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", "surrogateescape", newline="")
    header, *rows = [row for row in csv.reader(text, delimiter=delimiter, strict=True) if row] or [[]]
    if any(header.count(name) != 1 for name in COLUMNS.names) or any(len(row) != len(header) for row in rows):
        raise csv.Error
    return [{name: row[header.index(name)] for name in COLUMNS.names} for row in rows]


@given(raw_tables, block_sizes, st.sampled_from(["csv", "tsv"]))
@example([b'1,5" pipe,x\n2,6" pipe,y\n3,a,b\n'], 7, "csv")
@example([b'1,"a\nb",c\r2,d,e'], 1, "csv")
def test_the_cells_of_any_text_are_those_of_the_csv_module(
    parts: list[bytes], size: int, format: str
) -> None:
    delimiter = DELIMITERS[format]
    content = delimiter.join(COLUMNS.names).encode() + b"\n" + b"".join(parts)
    ours = try_to(
        lambda: flatten(read_lines_of(format)(divide(content, size), COLUMNS.find, "here")), InvalidItem
    )
    assert ours == try_to(lambda: read_by_csv(content, delimiter), csv.Error)


@given(block_sizes, st.integers(0, 3), st.sampled_from(["csv", "jsonl"]))
def test_a_row_that_is_too_long_is_named_by_its_line(size: int, num_before: int, format: str) -> None:
    row, header = (b"a,b,c\n", b"text,key,page\n") if format == "csv" else (b'{"text": "a"}\n', b"\n")
    content = header + row * num_before + row.replace(b"a", b"a" * 50)
    with pytest.raises(SubmissionTooLarge, match=f"here, line {num_before + 2}: more than 40 bytes"):
        list(read_lines_of(format)(divide(content, size), Columns(), "here", 40))


def read_by_json(content: bytes) -> Rows:
    lines = [line for line in content.decode("utf-8-sig", "surrogateescape").split("\n") if line.strip()]
    rows = list(map(json.loads, lines))
    if not all(isinstance(row, dict) for row in rows):
        raise TypeError
    return [{name: row.get(name) for name in COLUMNS.names} for row in rows]


numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none()
jsons = st.recursive(
    numbers | hostile, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile, inner, max_size=3)
)
json_rows = st.fixed_dictionaries({"key": hostile, "text": hostile | st.none()}, optional={"page": jsons})
junk = st.sampled_from(
    [b"", b" ", b"{", b"[1]", b'{"key":"a"} {"key":"b"}', b'{"key":\n"a"}', b'{"key": "\xff"}']
)


def dump(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=True).encode()


@given(
    st.lists(json_rows.map(dump) | junk, max_size=6), block_sizes, st.sampled_from([b"\n", b"\r\n", b"\n\n"])
)
def test_the_lines_of_any_text_are_those_of_the_json_module(
    lines: list[bytes], size: int, end: bytes
) -> None:
    content = b'{"key": "a", "text": "b", "page": 1}\n' + end.join(lines)
    ours = try_to(
        lambda: flatten(read_lines_of("jsonl")(divide(content, size), COLUMNS.find, "here")), InvalidItem
    )
    theirs = try_to(lambda: read_by_json(content), ValueError, TypeError, RecursionError)
    assert repr(ours) == repr(theirs)  # NaN is not equal to itself


def write_cells(rows: Rows, delimiter: str, quoting: int) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS.names, delimiter=delimiter, quoting=cast("Any", quoting))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


WRITERS: Mapping[InputName, Callable[[Rows], bytes]] = {
    "csv": lambda rows: write_cells(rows, ",", csv.QUOTE_MINIMAL),
    "tsv": lambda rows: write_cells(rows, "\t", csv.QUOTE_ALL),
    "jsonl": lambda rows: b"\xef\xbb\xbf" + b"\n \n".join(map(dump, rows)),
    "parquet": lambda rows: write_parquet(pa.Table.from_pylist(rows), 3),
}


def write_parquet(table: pa.Table, group: int = 1000) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=group)
    return sink.getvalue()


def assemble(batches: Iterator[RowBatch]) -> list[Item]:
    assembler = Assembler("here", 2048)
    return [item for batch in batches for item in assembler.assemble_batch(batch)]


def read_by_reference(path: Path, limits: ChunkLimits, format: str) -> list[Item]:
    """Return the items of an object as workers read them: each chunk by itself, and that in two halves."""
    items: list[Item] = []
    (found,) = find_objects(f"file://{path}", ANYWHERE)
    for cut in cut_object(found, format, COLUMNS, TokenEstimate(SPEC), limits):
        whole = cut.reference
        middle = whole.num_rows // 2
        halves = [*whole.take(0, middle).read(), *whole.take(middle, whole.num_rows).read()] if middle else []
        assert halves in ([], list(whole.read()))
        items += whole.read()
        assert whole.read_keys() == list(whole.read().keys)
    return items


texts = st.fixed_dictionaries({"key": hostile.filter(bool), "text": hostile, "page": hostile})


@given(st.lists(texts, min_size=1, max_size=8), block_sizes, st.integers(1, 4))
def test_every_format_whole_or_cut_anywhere_gives_the_same_items(
    rows: Rows, size: int, most_items: int
) -> None:
    expected = [
        Item(row["key"], row["text"].encode(), encode_metadata({"page": row["page"]})) for row in rows
    ]
    limits = ChunkLimits(most_items, max_bytes=60, max_row_bytes=1000)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PART_BYTES", size)
        for format, write in WRITERS.items():
            path = Path(folder, f"rows.{format}")
            path.write_bytes(write(rows))
            with path.open("rb") as file:
                assert assemble(read_rows(file, format, COLUMNS.find, "here")) == expected, format
            assert read_by_reference(path, limits, format) == expected, format
            sent = list(read_texts(str(path), RowReading(COLUMNS)))
            assert sent == list(map(to_json, expected)), format
        for table in (pd.DataFrame(rows), pl.DataFrame(rows), pa.Table.from_pylist(rows), rows):
            assert list(read_items(table, COLUMNS)) == list(map(to_json, expected))


zones = st.sampled_from([UTC, timezone(timedelta(hours=-7, minutes=-30))])
moments = st.datetimes(timezones=st.none() | zones)
EARLY, LATE = datetime.fromisoformat("1700-01-01"), datetime.fromisoformat("2200-01-01")
VALUES: Mapping[str, tuple[st.SearchStrategy[Any], Sequence[pa.DataType]]] = {
    "moment": (
        st.datetimes(EARLY, LATE),
        [
            pa.timestamp("us"),
            pa.timestamp("us", "Europe/Berlin"),
            pa.timestamp("ns", "UTC"),
            pa.timestamp("ns"),
        ],
    ),
    "date": (st.dates(), [pa.date32(), pa.date64()]),
    "time": (st.times(), [pa.time64("us"), pa.time64("ns")]),
    "duration": (
        st.timedeltas(timedelta(days=-9000), timedelta(days=9000)),
        [pa.duration("us"), pa.duration("ns")],
    ),
    "number": (st.integers(-(2**63), 2**63 - 1), [pa.int64()]),
    "float": (st.floats(width=32), [pa.float64(), pa.float32()]),
    "decimal": (st.decimals(-1000, 1000, places=3), [pa.decimal128(10, 3), pa.decimal256(40, 3)]),
    "bytes": (st.binary(max_size=4), [pa.binary(), pa.large_binary(), pa.binary_view()]),
    "text": (
        hostile,
        [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ),
    "bool": (st.booleans(), [pa.bool_()]),
}


@given(st.data())
def test_the_values_of_every_type_of_arrow_are_spelled_as_those_of_python(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(VALUES)))
    drawn, kinds = VALUES[name]
    kind = data.draw(st.sampled_from(kinds))
    values = data.draw(st.lists(drawn | st.none(), min_size=1, max_size=4))
    if getattr(kind, "tz", None):
        values = [value and value.replace(tzinfo=UTC) for value in values]
    column = pa.array(values, kind)
    for made, expected in (
        (column, values),
        (pa.chunked_array([column, column]), values * 2),
        (pa.array([values, None], pa.list_(kind)), [values, None]),
        (
            pa.array([{"a": value} for value in values], pa.struct([("a", kind)])),
            [{"a": value} for value in values],
        ),
    ):
        table = pa.table({"text": ["x"] * len(made), "page": made})
        ours = [item.metadata for item in assemble_table(table)]
        assert ours == [encode_metadata({"page": make_plain(value)}) for value in expected]


def assemble_table(table: pa.Table) -> list[Item]:
    columns = Columns("text", metadata=("page",))
    return assemble(read_rows(io.BytesIO(write_parquet(table)), "parquet", columns.find, "here"))


def test_moments_that_python_cannot_hold_are_spelled_too() -> None:
    for kind, number, expected in [
        (pa.timestamp("ns"), 1, "1970-01-01T00:00:00.000000001"),
        (pa.timestamp("ns", "UTC"), 1_000, "1970-01-01T00:00:00.000001Z"),
        (pa.timestamp("s"), 2**38, "+10680-07-14T06:09:04"),
        (pa.timestamp("s", "UTC"), -(2**37), "-2386-09-25T08:55:28Z"),
        (pa.date32(), 4_000_000, "+12921-08-18"),
        (pa.time64("ns"), 1, "00:00:00.000000001"),
        (pa.duration("ns"), 1, "PT0.000000001S"),
        (pa.timestamp("ns", "UTC"), -(2**63), None),
        (pa.date64(), 86_400_001, "1970-01-02"),
    ]:
        width = pa.int32() if kind == pa.date32() else pa.int64()
        table = pa.table({"text": ["x"], "page": pa.array([number], width).view(kind)})
        (sent,) = read_items(table, Columns(metadata=("page",)))
        assert msgspec.json.decode(encode_line(sent))["metadata"] == {"page": expected}
    late = pl.Series([2**60], dtype=pl.Int64).cast(pl.Datetime("ms"))
    for column, written in [
        (pl.Series([1], dtype=pl.Int64).cast(pl.Datetime("ns", "UTC")), b'"1970-01-01T00:00:00.000000001Z"'),
        (late.to_frame("a").to_struct("page"), b'{"a":"+36536598-01-28T21:54:06.976000"}'),
        (pl.Series([{}], dtype=pl.Struct([])), b"{}"),
        (late.implode(), b'["+36536598-01-28T21:54:06.976000"]'),
    ]:
        (sent,) = read_items(pl.DataFrame({"text": ["x"], "page": column}), Columns(metadata=("page",)))
        assert sent["metadata"] == msgspec.Raw(b'{"page":' + written + b"}")


def test_names_in_a_map_are_texts_of_any_value() -> None:
    for kind, name, expected in [
        (pa.binary(), b"a", "a"),
        (pa.bool_(), True, "true"),
        (pa.list_(pa.int8()), [1], "[1]"),
        (pa.struct([("a", pa.int8())]), {"a": 1}, '{"a":1}'),
    ]:
        page = pa.array([[(name, 2)]], pa.map_(kind, pa.int8()))
        (sent,) = read_items(pa.table({"text": ["x"], "page": page}), Columns(metadata=("page",)))
        assert msgspec.json.decode(encode_line(sent))["metadata"] == {"page": {expected: 2}}


PLAIN = (
    st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.booleans() | hostile | moments | st.dates()
)


@given(st.lists(PLAIN, min_size=1, max_size=4).filter(lambda values: len(set(map(type, values))) == 1))
def test_every_library_of_tables_gives_the_same_metadata(values: list[Any]) -> None:
    if isinstance(values[0], datetime) and len({value.tzinfo for value in values}) > 1:
        values = values[:1]
    rows = [{"key": str(place), "text": "x", "page": value} for place, value in enumerate(values)]
    if isinstance(values[0], datetime) and not all(1700 < value.year < 2200 for value in values):
        tables: list[Any] = [rows, pa.Table.from_pylist(rows)]  # pandas cannot hold it
    else:
        tables = [rows, pd.DataFrame(rows), pl.DataFrame(rows), pa.Table.from_pylist(rows)]
    told = [b"".join(map(encode_line, read_items(table, COLUMNS))) for table in tables]
    assert all(each == told[0] for each in told)


def test_rows_of_python_have_the_rules_of_files(tmp_path: Path) -> None:
    rows: Rows = [
        {"key": "a", "text": "one"},
        {"key": "b", "metadata": {"a": "\0", "b": 1}},
        {"key": None, "text": "three"},
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(map(dump, rows[:2])))
    (tmp_path / "in.csv").write_text('key,text,metadata\na,one,\nb,,"{""a"": ""\\u0000"", ""b"": 1}"\n')
    expected = [*map(encode_line, read_texts(str(tmp_path / "in.jsonl")))]
    assert expected == [
        b'{"key":"a","text":"one"}\n', b'{"key":"b","text":"","metadata":{"b":1}}\n'
    ]  # fmt: skip
    assert expected == [*map(encode_line, read_texts(str(tmp_path / "in.csv")))]
    for columns in (None, Columns()):
        assert expected == [*map(encode_line, read_items(rows[:2], columns))]
        with pytest.raises(InvalidItem, match="row 3: the key is null"):
            list(read_items(rows, columns))
        for strange in (None, 7, b"a", ("key", "text")):
            with pytest.raises(InvalidItem, match="row 2: expected a dictionary or a text"):
                list(read_items([rows[0], strange], columns))
        for metadata, kept in [
            *[(each, None) for each in (pd.NA, math.nan, pd.NaT, "", 5, False, [1], np.array([1, 2]), pd.Series([1]))],
            ('{"a": 1}', {"a": 1}), ('{"a": 1e999, "b": "\\ud800", "c": NaN, "d": 1}', {"a": None, "c": None, "d": 1}),
            (b'{"a": "caf\xe9", "b": 1}', {"b": 1}), ({1: "a", None: "b", "c": "d"}, {"1": "a", "null": "b", "c": "d"}),
        ]:  # fmt: skip
            items = read_items([{"key": "a", "text": "x", "metadata": metadata}] * 2, columns)
            assert [msgspec.json.decode(encode_line(item)).get("metadata") for item in items] == [kept] * 2
    for column in (pd.Series(["x"]), pl.Series(["x"]), np.array(["x"])):
        assert [item["text"] for item in read_items(column, None)] == ["x"]


@pytest.mark.parametrize("name", ["table", "rows", "csv", "jsonl", "parquet"])
def test_one_bad_row_harms_only_itself(name: str, tmp_path: Path) -> None:
    rows: Rows = [
        {"key": "a", "text": "one", "page": "1"},
        {"key": "b", "text": None, "page": "2"},
        {"key": "c", "text": "three", "page": "\0"},
        {"key": "d", "text": "four", "page": "4"},
    ]
    if name in ("table", "rows"):
        items = list(read_items(pd.DataFrame(rows) if name == "table" else rows, COLUMNS))
    else:
        (tmp_path / f"in.{name}").write_bytes(WRITERS[cast("InputName", name)](rows))
        items = list(read_texts(str(tmp_path / f"in.{name}"), RowReading(COLUMNS)))
    sent = [msgspec.json.decode(encode_line(item)) for item in items]
    assert [(item["key"], item["text"], item.get("metadata")) for item in sent] == [
        ("a", "one", {"page": "1"}), ("b", "", {"page": "2"}), ("c", "three", None), ("d", "four", {"page": "4"})
    ]  # fmt: skip


def test_bytes_that_are_not_utf8_fail_alone_in_every_format(tmp_path: Path) -> None:
    strings = pa.array([b"one", b"caf\xe9", b"two"]).view(pa.binary())
    table = pa.table({"key": ["a", "b", "c"], "text": strings.cast(pa.binary()), "page": ["1"] * 3})
    bad = pa.StringArray.from_buffers(3, strings.buffers()[1], strings.buffers()[2])
    for format, content in (
        ("csv", b"key,text,page\na,one,1\nb,caf\xe9,1\nc,two,1\n"),
        ("jsonl", b'{"key":"a","text":"one","page":"1"}\n{"key":"b","text":"caf\xe9","page":"1"}\n'
         b'{"key":"c","text":"two","page":"1"}'),
        ("parquet", write_parquet(table)),
        ("parquet", write_parquet(table.set_column(1, "text", bad))),
    ):  # fmt: skip
        path = tmp_path / f"in.{format}"
        path.write_bytes(content)
        with path.open("rb") as file:
            whole = assemble(read_rows(file, format, COLUMNS.find, "here"))
        for items in (whole, read_by_reference(path, ChunkLimits(2, 1000, 1000), format)):
            failures = [find_side_failure(item.text, 100) for item in items]
            assert [failure and failure.code for failure in failures] == [None, "lone_surrogate", None]
            assert [item.key for item in items] == ["a", "b", "c"]


DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]

KEYS: Sequence[tuple[Any, str | None]] = (
    ("a", "a"), (7, "7"), (2**70, str(2**70)), (Decimal("1.50"), "1.50"), (UUID(int=7), str(UUID(int=7))),
    (date(2026, 1, 2), "2026-01-02"), (time(3, 4, 5, 6), "03:04:05.000006"), (b"a", "a"),
    (datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))), "2026-01-02T01:04:05Z"),
    (np.timedelta64(36, "h"), "P1DT43200S"), (np.datetime64("2026-01-02T03:04"), "2026-01-02T03:04:00"),
    (pd.NA, None), (Decimal("sNaN"), None), (np.array([1, 2]), None), (10**5000, None), (DEEP, None),
    (None, None), (1.5, None), (math.nan, None), (Decimal("NaN"), None), (True, None), ([1], None), ({"a": 1}, None),
)  # fmt: skip


def test_a_key_is_what_the_table_says_or_refused_with_its_row() -> None:
    for value, expected in KEYS:
        rows = [{"key": "first", "text": "x"}, {"key": value, "text": "x"}]
        if expected is None:
            with pytest.raises(ValueError, match="key"):
                spell_key(value)
            with pytest.raises(InvalidItem, match="row 2: the key"):
                list(read_items(rows, Columns(key="key")))
        else:
            assert [item["key"] for item in read_items(rows, Columns(key="key"))] == ["first", expected]


def test_a_text_is_what_the_table_says_and_never_a_representation_of_python() -> None:
    values = [
        1,
        1.5,
        True,
        date(2026, 1, 2),
        Decimal("1.50"),
        [1, None],
        {"a": {"b": 1}},
        pd.Timedelta(1, "ns"),
        np.timedelta64(5, "D"),
        np.datetime64("2026-01-02T03:04:05.123"),
        np.array([[1], [2]]),
        np.array(["2026-01-02T03:04:05"], "M8[ns]"),
        pd.Series([1.5, math.nan]),
        pl.Series([]),
        pa.scalar(7),
        {b"a": 1, None: 2, True: 3, (1,): 4},
        Decimal("1E+400"),
        math.nan,
        None,
        pd.NaT,
        pd.NA,
        Decimal("sNaN"),
        Decimal("-Infinity"),
        np.datetime64("NaT"),
        pa.scalar(None),
        DEEP,
    ]
    items = read_items([{"text": value} for value in values], Columns())
    assert [item["text"] for item in items] == [
        "1", "1.5", "true", "2026-01-02", "1.50", "[1,null]", '{"a":{"b":1}}', "PT0.000000001S", "P5D",
        "2026-01-02T03:04:05.123000", "[[1],[2]]", '["2026-01-02T03:04:05"]', "[1.5,null]", "[]", "7",
        '{"[1]":4,"a":1,"null":2,"true":3}', "1E+400", *[""] * 9
    ]  # fmt: skip


def test_names_of_columns_have_one_rule_in_every_table(tmp_path: Path) -> None:
    frame = pd.DataFrame([["a", "b"]], columns=[0, 1])
    assert [item["text"] for item in read_items(frame, Columns("1", "0"))] == ["b"]
    for name in ("id", "key", "doi"):
        indexed = pd.DataFrame({"text": ["x", "y"]}, index=pd.Index(["k1", "k2"], name=name))
        assert [item["key"] for item in read_items(indexed, None)] == ["k1", "k2"]
    twice = [["a", "b", "c"]]
    (tmp_path / "in.csv").write_text("key,text,text\na,b,c\n")
    refused: list[Callable[[], Any]] = [
        lambda: list(read_items(pd.DataFrame(twice, columns=["key", "text", "text"]), None)),
        lambda: list(read_items(pa.table([["a"], ["b"], ["c"]], names=["key", "text", "text"]), None)),
        lambda: list(read_texts(str(tmp_path / "in.csv"))),
        lambda: read_by_reference(tmp_path / "in.csv", ChunkLimits(1, 1000, 1000), "csv"),
    ]
    for read in refused:
        with pytest.raises(VectormillError, match=r"has several columns 'text'|has no column 'page'"):
            read()


def test_a_chunk_of_parquet_is_bounded_by_all_that_it_holds(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "key": [f"{n}" for n in range(512)],
            "text": ["x"] * 512,
            "page": [f"{n}" * 1000 for n in range(512)],
        }
    )
    (tmp_path / "in.parquet").write_bytes(write_parquet(rows))
    (found,) = find_objects(f"file://{tmp_path}/in.parquet", ANYWHERE)
    (cut,) = cut_object(found, "parquet", COLUMNS, TokenEstimate(SPEC), ChunkLimits(512, 1 << 20, 1 << 20))
    held: Items = cut.reference.read()
    num_bytes = sum(map(len, held.texts)) + sum(map(len, held.metadata)) + sum(map(len, held.keys))
    assert cut.bytes_per_row * 512 > 0.5 * num_bytes
