"""Tables of other libraries go in as items; how they come out: tests/integration/cli/test_commands.py."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from vectormill.client.frames import read_items
from vectormill.domain.errors import InvalidItem, InvalidOption
from vectormill.files.ndjson import ItemJson, encode_line
from vectormill.rows.columns import Columns

COLUMNS = Columns(text="body", key="id", metadata=("page", "day"))
DATA: dict[str, list[Any]] = {
    "id": [1, 2],
    "body": ["one", "three"],
    "page": [7, None],
    "day": [date(2026, 11, 23)] * 2,
    "unused": [b"\xff", b"\xfe"],
}
ITEMS = [
    {"key": "1", "text": "one", "metadata": {"page": 7, "day": "2026-11-23"}},
    {"key": "2", "text": "three", "metadata": {"page": None, "day": "2026-11-23"}},
]


def as_sent(items: Iterable[ItemJson]) -> list[Any]:
    return [json.loads(encode_line(item)) for item in items]


def make_rows() -> list[dict[str, Any]]:
    return [dict(zip(DATA, values, strict=True)) for values in zip(*DATA.values(), strict=True)]


def test_the_rows_of_a_table_are_items_and_can_be_read_again() -> None:
    for table in [
        pd.DataFrame(DATA),
        pl.DataFrame(DATA),
        pl.DataFrame(DATA).lazy(),
        pa.table(DATA),
        pa.table(DATA).to_batches()[0],
        make_rows(),
    ]:
        items = read_items(table, COLUMNS)
        assert as_sent(items) == ITEMS
        assert as_sent(items) == ITEMS
        assert iter(items) is not items


def test_what_can_be_read_once_is_its_own_iterator_so_that_no_upload_repeats_it() -> None:
    for once in (pa.table(DATA).to_reader(), iter(make_rows())):
        items = read_items(once, COLUMNS)
        assert iter(items) is items
        assert as_sent(items) == ITEMS


def test_a_stream_of_batches_is_read_as_it_is_needed() -> None:
    num_read = 0

    def make_batches() -> Iterator[pa.RecordBatch]:
        nonlocal num_read
        for number in range(1000):
            num_read += 1
            yield pa.record_batch({"key": [f"{number}"], "text": ["a text"]})

    schema = pa.schema([("key", pa.string()), ("text", pa.string())])
    items = iter(read_items(pa.RecordBatchReader.from_batches(schema, make_batches()), None))
    assert next(items) == {"key": "0", "text": "a text"}
    assert num_read <= 2


def test_the_index_of_a_frame_is_its_key_when_it_is_named_so() -> None:
    frame = pd.DataFrame(DATA).set_index("id")
    assert [item["key"] for item in read_items(frame, COLUMNS)] == ["1", "2"]


def test_texts_alone_are_counted() -> None:
    for texts in (["one", "two"], iter(["one", "two"])):
        assert list(read_items(texts, None)) == [{"key": "1", "text": "one"}, {"key": "2", "text": "two"}]


def test_items_go_unchanged_and_as_often_as_they_can_be_read() -> None:
    assert list(read_items([], None)) == []
    items = read_items(ITEMS, None)
    assert iter(items) is not items
    assert [item is other for item, other in zip(items, ITEMS, strict=True)] == [True, True]
    once = read_items(iter(ITEMS), None)
    assert iter(once) is once
    assert list(once) == ITEMS


def test_what_is_missing_is_named() -> None:
    for table, columns, error, sentence in [
        (pd.DataFrame({"body": ["a"]}), None, InvalidItem, "no column 'text'.*with text= and key="),
        ([{"id": 1, "body": "a"}], None, InvalidItem, "named 'id', 'body'.*key=.*text="),
        (iter([{"id": 1, "text": "a"}]), None, InvalidItem, "named 'id'.*key=.*text="),
        (pl.DataFrame({"text": ["a"]}), Columns(key="id"), InvalidItem, "no column 'id'"),
        (pd.DataFrame({"key": ["a", None], "text": ["a", "b"]}), None, InvalidItem, "row 2: the key is null"),
        (pa.table({"text": ["a"]}), Columns(metadata=("page",)), InvalidItem, "no column 'page'"),
        ("a text", None, InvalidOption, "got str"),
        (7, None, InvalidOption, "a DataFrame of pandas or polars"),
    ]:
        with pytest.raises(error, match=sentence):
            list(read_items(table, columns))


def test_the_client_alone_loads_no_library_of_tables_or_servers() -> None:
    program = "import sys; from vectormill import Client, AsyncClient; Client(); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ended.stdout.split()}
    heavy = {"pyarrow", "pandas", "polars", "numpy", "psycopg", "sqlalchemy", "torch", "celery", "fastapi"}
    assert not loaded & heavy
    assert Path("vectormill/py.typed").exists()
