"""What every kind of source keeps: the same rows, in an order that is the same every time, a few at a time, and a
SourceFailed for whatever ends the reading."""

import csv
import gzip
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from sqlalchemy import Engine, create_engine, text

from tests.database import ask, execute
from tests.protocol import make_items, submit
from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item, split_pair
from vectormill.models.registry import Registry
from vectormill.rows.values import encode_metadata
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.pushes import PushWriter
from vectormill.sources.reader import MOST_BYTES, MOST_ROWS, SourcePlace
from vectormill.sources.source import FILES, OWN_TEXTS, PUSH, SQL, TREE, Source
from vectormill.sources.sources import save_source

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Laid:
    """A source that has some rows; `destroy` makes it unreadable before its end."""

    source: Source
    place: SourcePlace
    destroy: Callable[[], object]


@dataclass(frozen=True)
class World:
    engine: Engine
    admin: Engine
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def place(self, **more: Any) -> SourcePlace:
        return SourcePlace(self.engine, Settings(), Registry({}), collection="docs", **more)


@pytest.fixture
def world(engine: Engine, admin: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(engine, admin, tmp_path, monkeypatch)


COLUMNS = {"key": "id", "text": "body", "metadata": ["lang"]}


def name_other(key: str) -> str:
    """The text of a row that a pair has beside it."""
    return f"Zu „{key}“"


def as_object(key: str, body: str) -> str:
    return json.dumps({"id": key, "body": body, "lang": "de", "other": name_other(key)})


def fill_table(engine: Engine, rows: Rows) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE articles (id varchar(99), body text, lang text, other text)"))
        values = [{"id": key, "body": body, "other": name_other(key)} for key, body in rows]
        connection.execute(text("INSERT INTO articles VALUES (:id, :body, 'de', :other)"), values)


def lay_postgres(world: World, rows: Rows) -> Laid:
    fill_table(world.engine, rows)
    query = 'SELECT * FROM articles ORDER BY id COLLATE "C"'
    broken = "ALTER TABLE articles ALTER body TYPE text USING body; DROP TABLE articles"

    def destroy() -> None:
        with world.engine.begin() as connection:
            connection.exec_driver_sql(broken)

    return Laid(Source(SQL, {"query": query, **COLUMNS}), world.place(), destroy)


def lay_sqlite(world: World, rows: Rows) -> Laid:
    path = world.folder / "articles.db"
    engine = create_engine(f"sqlite:///{path}")
    fill_table(engine, rows)
    engine.dispose()
    world.monkeypatch.setenv("ARTICLES_URL", f"sqlite:///{path}")
    options = {"query": "SELECT * FROM articles ORDER BY id", "url_env": "ARTICLES_URL", **COLUMNS}
    return Laid(
        Source(SQL, options), world.place(), lambda: path.write_bytes(path.read_bytes()[:5000] + b"?" * 9000)
    )


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 9])


def lay_jsonl(
    world: World, rows: Rows, suffix: str = ".jsonl", pack: Callable[[bytes], bytes] = bytes
) -> Laid:
    """In two files, so that their order counts."""
    half = len(rows) // 2
    for name, part in (("b", rows[half:]), ("a", rows[:half])):
        lines = [as_object(*row) for row in part]
        (world.folder / f"{name}{suffix}").write_bytes(pack("\n".join(lines).encode()))
    options = {"files": [f"{world.folder}/*{suffix}"], **COLUMNS}
    return Laid(Source(FILES, options), world.place(), lambda: truncate(world.folder / f"b{suffix}"))


def lay_gzip(world: World, rows: Rows) -> Laid:
    return lay_jsonl(world, rows, ".jsonl.gz", gzip.compress)


def lay_zstd(world: World, rows: Rows) -> Laid:
    return lay_jsonl(world, rows, ".ndjson.zst", zstandard.ZstdCompressor().compress)


def lay_store(world: World, rows: Rows) -> Laid:
    """Through fsspec, in a store of no disk."""
    lines = [as_object(*row) for row in rows]
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/rows.jsonl", "\n".join(lines).encode())
    options = {"files": ["memory://bucket/*.jsonl"], **COLUMNS}
    return Laid(
        Source(FILES, options), world.place(), lambda: store.pipe("/bucket/rows.jsonl", b'{"id": "a", "bo')
    )


def lay_csv(world: World, rows: Rows) -> Laid:
    path = world.folder / "rows.csv"
    with path.open("w", newline="") as file:
        table = [("de", name_other(key), key, body) for key, body in rows]
        csv.writer(file).writerows([("lang", "other", "id", "body"), *table])
    return Laid(
        Source(FILES, {"files": [str(path)], **COLUMNS}),
        world.place(),
        lambda: path.write_bytes(path.read_bytes()[:-1] + b'\n"'),
    )


def lay_parquet(world: World, rows: Rows) -> Laid:
    path = world.folder / "rows.parquet"
    keys, bodies = zip(*rows, strict=True)
    others = list(map(name_other, keys))
    columns = {"body": bodies, "other": others, "id": keys, "lang": ["de"] * len(rows)}
    pyarrow.parquet.write_table(pyarrow.table(columns | {"more": [1.5] * len(rows)}), path)
    return Laid(Source(FILES, {"files": [str(path)], **COLUMNS}), world.place(), lambda: truncate(path))


def lay_push(world: World, rows: Rows) -> Laid:
    submit(world.engine, make_items(1), collection="docs")
    ask(world.engine, save_source, "docs", Source(PUSH, {}))
    with PushWriter(world.engine, "docs", {}) as writer:
        for key, body in rows:
            writer.add(Item(key, body.encode(), b'{"lang":"de"}'))
        run_id = writer.finish()

    def destroy() -> None:
        execute(world.admin, "ALTER TABLE vectormill.run_parts RENAME TO away")

    return Laid(Source(PUSH, {}), world.place(run_id=run_id), destroy)


def lay_own_texts(world: World, rows: Rows) -> Laid:
    submit(world.engine, make_items(1), collection="docs")
    with world.engine.begin() as connection:
        connection.execute(text("UPDATE vectormill.collections SET keep_text = true"))
        generation = connection.execute(text("SELECT id FROM vectormill.generations")).scalar_one()
        values = [{"key": key, "text": body} for key, body in rows]
        connection.execute(
            text(f"""
                INSERT INTO vectormill.generation_{generation} (key, content_hash, embedding, job_seq)
                VALUES (:key, '', array_fill(1, ARRAY[8])::halfvec, 1)"""),
            values,
        )
        connection.execute(
            text(f"""
                INSERT INTO vectormill.generation_{generation}_attributes (key, text, metadata, job_seq)
                VALUES (:key, :text, '{{"lang": "de"}}', 1)"""),
            values,
        )

    def destroy() -> None:
        execute(world.engine, f"ALTER TABLE vectormill.generation_{generation}_attributes RENAME TO away")

    return Laid(Source(OWN_TEXTS, {}), world.place(), destroy)


def lay_tree(world: World, rows: Rows) -> Laid:
    folder = world.folder / "tree"
    folder.mkdir()
    for key, body in rows:
        (folder / key).write_text(body)
    last = folder / max(key for key, _ in rows)

    def destroy() -> None:
        last.unlink()
        last.mkdir()
        (last / ".hidden").touch()
        last.rename(last.with_name("zz"))
        last.symlink_to("/proc/self/mem")

    return Laid(Source(TREE, {"folder": str(folder), "include": ["*"]}), world.place(), destroy)


KINDS = (
    lay_postgres, lay_sqlite, lay_jsonl, lay_gzip, lay_zstd, lay_store, lay_csv, lay_parquet, lay_push, lay_own_texts,
    lay_tree,
)  # fmt: skip
LONG = [(f"k{number:05}", f'Ünïcode, "quoted",\nand in lines: {number}') for number in range(900)]


@pytest.mark.parametrize("lay", KINDS, ids=lambda lay: lay.__name__)
def test_every_kind_gives_the_same_rows_every_time_leaves_nothing_open_and_fails_in_words(
    lay: Callable[[World, Rows], Laid], world: World
) -> None:
    laid = lay(world, LONG)
    reader = open_source(laid.source, laid.place)
    first = [item for batch in reader.read() for item in batch]
    again = [item for batch in open_source(laid.source, laid.place).read() for item in batch]
    metadata = [{"path": key} if lay is lay_tree else {"lang": "de"} for key, _ in LONG]
    place = (
        1 if lay is lay_own_texts else None
    )  # the rows of the collection itself are carried in their places
    wanted = [
        Item(key, body.encode(), encode_metadata(described), place)
        for (key, body), described in zip(LONG, metadata, strict=True)
    ]
    assert first == wanted
    assert again == first
    assert not reader.complaints
    given_up = open_source(laid.source, laid.place).read()
    next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    open_transactions = text("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%'")
    assert execute(world.engine, open_transactions).scalar_one() == 0
    laid.destroy()
    with pytest.raises(SourceFailed) as failure:
        list(open_source(laid.source, laid.place).read())
    assert str(failure.value).endswith((".", "?"))
    assert "Traceback" not in str(failure.value)


WITH_COLUMNS = (lay_postgres, lay_sqlite, lay_jsonl, lay_csv, lay_parquet)


@pytest.mark.parametrize("lay", WITH_COLUMNS, ids=lambda lay: lay.__name__)
def test_a_column_of_second_texts_makes_every_row_a_pair(
    lay: Callable[[World, Rows], Laid], world: World
) -> None:
    laid = lay(world, LONG)
    source = replace(laid.source, options={**laid.source.options, "text_pair": "other"})
    items = [item for batch in open_source(source, laid.place).read() for item in batch]
    assert [(item.key, split_pair(item.text), item.metadata) for item in items] == [
        (key, (body.encode(), name_other(key).encode()), b'{"lang":"de"}') for key, body in LONG
    ]
    missing = replace(laid.source, options={**laid.source.options, "text_pair": "nothing"})
    with pytest.raises(SourceFailed, match="has no column 'nothing'"):
        list(open_source(missing, laid.place).read())


@pytest.mark.parametrize("lay", KINDS, ids=lambda lay: lay.__name__)
def test_no_kind_has_all_of_its_rows_in_memory(lay: Callable[[World, Rows], Laid], world: World) -> None:
    num_rows, num_chars = 1200, 20_000
    laid = lay(world, [(f"k{number:05}", "x" * num_chars) for number in range(num_rows)])
    tracemalloc.start()
    try:
        counted = 0
        most_at_once = 0
        for batch in open_source(laid.source, laid.place).read():
            counted += len(batch)
            most_at_once = max(most_at_once, len(batch))
            del batch
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert counted == num_rows
    assert most_at_once <= MOST_ROWS // 8
    assert peak < 4 * MOST_BYTES < 1.5 * num_rows * num_chars
