"""A holder of a key of scope `sources` names queries and files: what they reach beyond what they were given."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.clusters import connect, new_directory
from tests.database import ask, execute
from tests.protocol import make_items, submit
from tests.waiting import wait_for
from vectormill.addresses import to_libpq
from vectormill.db.roles import derive_url
from vectormill.domain.errors import SourceFailed
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.jobs.item import Item
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
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


# A source's query with one of these expressions must be refused, because it reads what was not granted to the reader.
OUT_OF_REACH = (
    "(SELECT pg_read_file('/etc/hostname'))",
    "(SELECT string_agg(name, ',') FROM pg_ls_dir('/etc') AS name)",
    "(SELECT string_agg(secret, ',') FROM vectormill.webhooks)",
    "(SELECT encode(hash, 'hex') FROM vectormill.api_keys LIMIT 1)",
    "(SELECT items::text FROM vectormill.chunk_payloads LIMIT 1)",
    "(SELECT passwd FROM pg_shadow LIMIT 1)",
    "(SELECT lo_import('/etc/hostname')::text)",
    "(SELECT pg_terminate_backend(pid)::text FROM pg_stat_activity WHERE application_name = 'test' LIMIT 1)",
    "(SELECT pg_try_advisory_lock(130502399484261)::text)",
    "(SELECT memory FROM vectormill_server.read_machine())",
    "(SELECT string_agg(key, ',') FROM docs)",
)


@pytest.fixture
def client(engine: Engine, roles: Settings) -> Iterator[httpx.Client]:
    """A client with a key of scope `sources`, on an API whose sources have a role of their own."""
    submit(engine, make_items(1), collection="docs")
    secret = make_secret()
    with engine.begin() as connection:
        create_key(connection, "stranger", secret, "sources", None)
    with api_client(engine, reader_database_url=roles.reader_database_url) as client:
        client.headers["Authorization"] = f"Bearer {secret}"
        yield client


def set_source(client: httpx.Client, query: str) -> httpx.Response:
    body = {"kind": "sql", "options": {"query": query, "key": "key", "text": "text"}}
    return client.put("/v1/collections/docs/source", json=body)


@pytest.mark.parametrize("wanted", OUT_OF_REACH)
def test_a_query_of_a_source_sees_what_was_granted_and_nothing_of_ours(
    client: httpx.Client, wanted: str
) -> None:
    query = f"SELECT 'a' AS key, {wanted} AS text"
    answer = set_source(client, query)
    assert answer.status_code == 422, answer.text
    assert re.search("permission denied|must be a superuser|Only roles", answer.json()["detail"]), answer.text
    for path in ("/v1/quotes", "/v1/collections/docs/source/following"):
        body = {"kind": "sql", "options": {"query": query}} if path.endswith("quotes") else {}
        refused = client.post(path, json=body)
        assert refused.status_code >= 400, refused.text


def test_a_refusal_prints_the_grant_that_the_source_needs(client: httpx.Client, admin_url: str) -> None:
    with psycopg.connect(to_libpq(admin_url), autocommit=True) as connection:
        connection.execute("CREATE TABLE public.articles AS SELECT 'a' AS key, 'one' AS text")
        refused = set_source(client, "SELECT key, text FROM articles")
        assert refused.status_code == 422, refused.text
        (grant,) = re.findall(r"(GRANT [^;]+);", refused.json()["detail"])
        assert grant == "GRANT SELECT ON articles TO vectormill_reader"
        connection.execute(grant)
    assert set_source(client, "SELECT key, text FROM articles").is_success


HELD_LOCKS = """
    SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database
     WHERE locktype = 'advisory' AND datname = current_database()
"""


def test_locks_and_settings_of_a_query_end_with_its_session(engine: Engine) -> None:
    """With one role, as an operator may have given it, a query may take locks; no later session has them."""
    submit(engine, make_items(1), collection="docs")
    with api_client(engine) as client:
        query = "SELECT 'a' AS key, concat(pg_advisory_lock(7), set_config('work_mem', '1MB', false)) AS text"
        assert set_source(client, query).is_success
        wait_for(lambda: execute(engine, HELD_LOCKS).scalar_one() == 0, because="the session has ended")


def test_processes_are_no_superusers_and_read_one_file_of_the_server_alone(engine: Engine) -> None:
    assert execute(engine, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user").scalar_one() is False
    assert (
        "MemAvailable" in execute(engine, "SELECT memory FROM vectormill_server.read_machine()").scalar_one()
    )
    for statement in (
        "SELECT pg_read_file('/etc/hostname')",
        "DROP TABLE vectormill.api_keys",
        "UPDATE vectormill.alembic_version SET version_num = '0001'",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "CREATE ROLE another",
    ):
        with pytest.raises(Exception, match=r"permission denied|must be owner"):
            execute(engine, statement)


@pytest.fixture
def postgres_home() -> Iterator[EmbeddedPostgres]:
    with new_directory() as home:
        server = EmbeddedPostgres(home)
        yield server
        server.destroy()


def test_a_cluster_of_the_release_before_keeps_what_its_sources_read(postgres_home: EmbeddedPostgres) -> None:
    admin = postgres_home.start()
    with connect(admin) as connection:  # as it was when there was one role
        for role in ("vectormill_owner", "vectormill_service", "vectormill_reader"):
            connection.execute(f"DROP OWNED BY {role}")
            connection.execute(f"DROP ROLE {role}")
        connection.execute("CREATE SCHEMA vectormill CREATE TABLE articles (text text)")
        connection.execute("INSERT INTO vectormill.articles VALUES ('one')")
        connection.commit()
    postgres_home.stop()
    admin = postgres_home.start()
    with connect(derive_url(admin, "vectormill_reader")) as connection:
        assert connection.execute("SELECT text FROM articles").fetchone() == ("one",)
    with connect(derive_url(admin, "vectormill_owner")) as connection:
        assert connection.execute("SELECT text FROM articles").fetchone() == ("one",)


def list_ways(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each request that names a file or a folder of the server's machine, as method, path and body."""
    files: dict[str, Any] = {"kind": "files", "options": {"files": [str(path)], "format": "jsonl"}}
    query = {"query": "SELECT 1 AS key, 'x' AS text", "url_file": str(path)}
    wanted: dict[str, Any] = {"urls": [str(path)], "text": "text"}
    for check in "true", "false":
        source = f"/v1/collections/docs/source?check={check}"
        yield "PUT", source, files
        yield "PUT", source, {"kind": "files", "options": {"files": [f"file://{path.parent}/*.jsonl"]}}
        yield "PUT", source, {"kind": "files", "options": {"files": [f"local://{path}"]}}
        yield "PUT", source, {"kind": "tree", "options": {"folder": str(path.parent), "include": ["*"]}}
        yield "PUT", source, {"kind": "sql", "options": query}
    yield "POST", "/v1/jobs", {"input": wanted}
    yield "POST", "/v1/jobs", {"input": wanted | {"urls": [f"file://{path.parent}/*.jsonl"]}}
    yield "POST", "/v1/jobs", {"input": wanted, "dry_run": True}
    yield "POST", "/v1/jobs", {"items": [{"key": "a", "text": "b"}], "to": str(path.parent / "out")}
    yield "POST", "/v1/jobs", {"items": [{"key": "a", "text": "b"}], "to": f"file://{path.parent}/out"}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_no_request_names_a_file_beyond_the_folders_that_are_set(
    engine: Engine, tmp_path: Path, host: str
) -> None:
    submit(engine, make_items(1), collection="docs")
    secret = make_secret()
    ask(engine, create_key, "sources", secret, "sources")
    allowed, beyond, data_dir = tmp_path / "allowed", tmp_path / "beyond", tmp_path / "allowed" / "data"
    for folder in allowed, beyond, data_dir:
        folder.mkdir(exist_ok=True)
        (folder / "rows.jsonl").write_text('{"key": "a", "text": "a secret"}\n')
    (allowed / "link").symlink_to(beyond)
    unset = {"source_root": (), "output_root": ()}
    named = {"source_root": (tmp_path / "other", allowed), "output_root": allowed, "data_dir": data_dir}
    cases = (
        (unset, allowed, "whose files requests may name only below a folder: set VECTORMILL_"),
        (
            named,
            beyond,
            f"restart with `VECTORMILL_(SOURCE|OUTPUT)_ROOT=[^`]*:{beyond}(/out)? vectormill up --data-dir",
        ),
        (named, allowed / "link", "is not below"),
        (named, data_dir, "is not below"),
        (named, allowed / ".." / "beyond", r"is not below|has a part '\.' or '\.\.'"),
    )
    for settings, folder, said in cases:
        with api_client(engine, api_host=host, **settings) as client:
            client.headers["Authorization"] = f"Bearer {secret}"
            for method, path, body in list_ways(folder / "rows.jsonl"):
                answer = client.request(method, path, json=body)
                assert answer.status_code == 422, (body, answer.text)
                assert re.search(said, answer.json()["detail"]), (body, answer.text)
                assert "a secret" not in answer.text
    with api_client(engine, api_host=host, **named) as client:
        client.headers["Authorization"] = f"Bearer {secret}"
        for method, path, body in list_ways(allowed / "rows.jsonl"):
            answer = client.request(method, path, json=body)
            assert "is not below" not in answer.text, (body, answer.text)
    assert [path.name for path in beyond.iterdir()] == ["rows.jsonl"]
