"""A holder of a key of scope `sources` names queries and files: what they reach beyond what they were given."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import FILES, SQL, Source

# Statements that write to a database of SQLite, or beside it, and what of the machine they might show.
WRITING = (
    "DROP TABLE articles",
    "DELETE FROM articles RETURNING id, body",
    "UPDATE articles SET body = 'mine' RETURNING id, body",
    "INSERT INTO articles VALUES (2, 'mine') RETURNING id, body",
    "CREATE TABLE mine AS SELECT 1 AS id, 'x' AS body",
    "CREATE TEMP TABLE mine AS SELECT 1 AS id, 'x' AS body",
    "ALTER TABLE articles RENAME TO mine",
    "VACUUM",
    "VACUUM INTO '{folder}/new.db'",
    "ATTACH '{folder}/new.db' AS mine",
    "ATTACH '{folder}/other.db' AS mine",
    "BEGIN IMMEDIATE",
    "PRAGMA user_version = 7",
    "PRAGMA journal_mode = WAL",
    "PRAGMA writable_schema = ON",
    "PRAGMA temp_store_directory = '{folder}'",
    "PRAGMA table_list",
    "SELECT name AS id, file AS body FROM pragma_database_list",
    "REINDEX",
    "ANALYZE",
    "SELECT 1 AS id, load_extension('{folder}/mine') AS body",
    "SELECT 1 AS id, writefile('{folder}/new.db', 'x') AS body",
    "SELECT 1 AS id, 'x' AS body; DROP TABLE articles",
    "COMMIT; DROP TABLE articles",
    "SELECT 1 AS id, zeroblob(900000000) AS body",
)


@pytest.fixture
def place(engine: Engine) -> SourcePlace:
    return SourcePlace(engine, Settings(), Registry({}), collection="docs")


def read_query(place: SourcePlace, query: str, **more: object) -> list[Item]:
    options = {"query": query, "key": "id", "text": "body", "url_env": "ARTICLES_URL", **more}
    return [item for batch in open_source(Source(SQL, options), place).read() for item in batch]


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_no_statement_writes_to_a_database_of_sqlite_or_beside_it(
    place: SourcePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: str
) -> None:
    path = tmp_path / "50% of?.db"
    for each in (path, tmp_path / "other.db"):
        with closing(sqlite3.connect(each)) as database, database:
            database.execute("CREATE TABLE articles (id INTEGER PRIMARY KEY, body TEXT)")
            database.execute("INSERT INTO articles VALUES (1, 'one')")
            database.execute(f"PRAGMA journal_mode = {journal}")
    kept = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    address = f"sqlite:///{tmp_path}/50%25 of%3F.db"
    for url in (address, f"sqlite:///file:{tmp_path}/50%2525 of%253F.db?mode=rwc&uri=true"):
        monkeypatch.setenv("ARTICLES_URL", url)
        for query in WRITING:
            with pytest.raises(SourceFailed):
                read_query(place, query.format(folder=tmp_path))
            assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == kept, query
        counted = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3) "
        assert len(read_query(place, counted + "SELECT i AS id, upper(body) AS body FROM n, articles")) == 3
    monkeypatch.setenv("ARTICLES_URL", f"sqlite:///{tmp_path}/new.db")
    with pytest.raises(SourceFailed, match="unable to open"):
        read_query(place, "SELECT 1 AS id, 'x' AS body")
    assert not (tmp_path / "new.db").exists()


def test_drivers_and_protocols_that_nothing_guards_need_the_operator(
    place: SourcePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowing = replace(place, settings=Settings(unguarded_sources="sftp, mysql+mysqldb sqlite+aiosqlite"))
    for url in (
        "mysql+mysqldb://u@h/d",
        "mysql://u@h/d",
        "oracle://u@h/d",
        f"sqlite+aiosqlite:///{tmp_path}/x.db",
    ):
        monkeypatch.setenv("ARTICLES_URL", url)
        with pytest.raises(SourceFailed, match="could write whatever the login of its URL may"):
            read_query(place, "SELECT 1 AS id, 'x' AS body")
    monkeypatch.setenv("ARTICLES_URL", "mysql+mysqldb://u@h/d")
    with pytest.raises(SourceFailed, match="driver is not installed"):
        read_query(allowing, "SELECT 1 AS id, 'x' AS body")
    protocols = ("ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs", "github", "git", "jupyter", "dbfs", "zip")
    for protocol in protocols:
        source = Source(FILES, {"files": [f"{protocol}://127.0.0.1/x.csv"]})
        with pytest.raises(SourceFailed, match="whose connections are not checked"):
            list(open_source(source, place).read())
    with pytest.raises(SourceFailed, match="needs a package that is not installed"):
        list(open_source(Source(FILES, {"files": ["sftp://127.0.0.1/x.csv"]}), allowing).read())
