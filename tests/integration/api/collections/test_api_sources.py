"""Sources and pushes over HTTP, by the client and the command line, on a real API."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from tests.api_server import NDJSON, api_client, assert_problem, delete, lines, many
from tests.commands import run
from tests.database import ask, execute
from tests.kinds import SCORES
from tests.protocol import make_items, submit
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.domain.errors import InvalidItem
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.item import Item, join_pair
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.models.registry import Registry
from vectormill.problems import ApiError
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import PUSH, Source

QUERY = {"query": "SELECT n AS key, 'text ' || n AS text FROM generate_series(1, 5) AS n"}
PATH = "/v1/collections/docs/source"


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    submit(engine, make_items(1), collection="docs")
    with api_client(engine) as client:
        yield client


@pytest.fixture
def client(api: httpx.Client) -> Iterator[Client]:
    with Client(str(api.base_url)) as client:
        yield client


def count(engine: Engine, table: str) -> int:
    return int(execute(engine, f"SELECT count(*) FROM vectormill.{table}").scalar_one())


def test_a_source_is_looked_at_kept_shown_and_deleted(client: Client, engine: Engine) -> None:
    saved = client.set_source("docs", "sql", QUERY, split={"by": "paragraphs"})
    check = saved["check"]
    assert check is not None
    assert check["num_sampled"] == 5
    assert check["is_whole"]
    assert [row["key"] for row in check["rows"]] == ["1#0", "2#0", "3#0"]
    assert (check["rows"][0]["metadata"] or {})["_passage"] == {
        "document": "1",
        "end": 6,
        "index": 0,
        "start": 0,
    }
    shown = client.source("docs")
    assert (shown["kind"], shown["options"], shown["split"]) == ("sql", QUERY, {"by": "paragraphs"})
    assert shown["check"] is None
    assert client.check_source("docs") == check
    assert client.set_source("docs", "push")["created_at"] == shown["created_at"]
    client.delete_source("docs")
    with pytest.raises(ApiError, match="has no source"):
        client.source("docs")
    assert count(engine, "sources") == 0


def test_a_source_that_cannot_serve_is_refused_and_not_kept(api: httpx.Client, engine: Engine) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"kind": "sql", "options": {"query": "SELECT 1 AS key"}}, "source-failed", "no column 'text'"),
        (
            {"kind": "sql", "options": {"query": "SELECT 1", "url": "x"}},
            "invalid-option",
            "unknown field `url`",
        ),
        ({"kind": "sql", "options": {**QUERY, "url_env": "NO_SUCH"}}, "source-failed", "NO_SUCH is not set"),
        ({"kind": "files", "options": {"files": ["ftp://u:secret@h/x.csv"]}}, "invalid-option", "password"),
        ({"kind": "tree", "options": {"folder": "/\0"}}, "invalid-option", "NUL"),
        ({"kind": "tree", "options": {"folder": "/\ud800"}}, "invalid-option", "surrogate"),
        ({"kind": "push", "split": {"by": "words"}}, "invalid-option", "split, by"),
        ({"kind": "ldap"}, "invalid-option", "expected one of: sql, files, tree, push, own_texts"),
    ]
    for body, code, said in cases:
        answer = api.put(PATH, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert_problem(answer, 422, code, said)
        assert count(engine, "sources") == 0
        assert "secret" not in answer.text


def test_a_source_is_kept_unread_when_that_is_asked_for(client: Client, engine: Engine) -> None:
    options = {**QUERY, "url_env": "OF_THE_INDEXER_ALONE"}
    assert client.set_source("docs", "sql", options, check=False)["check"] is None
    with pytest.raises(ApiError, match="OF_THE_INDEXER_ALONE is not set"):
        client.check_source("docs")


def test_a_collection_that_is_not_there_has_no_source(api: httpx.Client) -> None:
    body = {"kind": "push"}
    for answer in (
        api.put("/v1/collections/nothing/source", json=body),
        api.get("/v1/collections/nothing/source"),
        delete(api, "/v1/collections/nothing/source"),
        api.post("/v1/collections/nothing/source/check"),
        api.post("/v1/collections/nothing/push", content=lines(many(1)), headers=NDJSON),
    ):
        assert_problem(answer, 404, "collection-not-found")
    assert_problem(api.get(PATH), 404, "source-not-found")


def test_an_api_that_others_reach_reads_no_files_of_its_own_machine(engine: Engine, tmp_path: Path) -> None:
    submit(engine, make_items(1), collection="docs")
    secret = make_secret()
    ask(engine, create_key, "admin", secret, "admin", None)
    headers = {"Authorization": f"Bearer {secret}"}
    local = [
        {"kind": "files", "options": {"files": ["/proc/self/environ"], "format": "tsv"}},
        {"kind": "files", "options": {"files": ["file:///proc/self/environ"], "format": "tsv"}},
        {"kind": "tree", "options": {"folder": "/etc"}},
    ]
    with api_client(engine, api_host="0.0.0.0", source_root=()) as client:
        for body in local:
            answer = client.put(PATH, json=body, headers=headers)
            assert_problem(answer, 422, "invalid-option", "VECTORMILL_SOURCE_ROOT")
    (tmp_path / "rows.jsonl").write_bytes(b'{"key": "a", "text": "b"}\n')
    with api_client(engine, api_host="0.0.0.0", source_root=tmp_path) as client:
        body = {"kind": "files", "options": {"files": ["rows.jsonl"]}}
        assert client.put(PATH, json=body, headers=headers).status_code == 200


def test_a_table_that_is_none_is_refused_without_its_content(api: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(b"VECTORMILL_DATABASE_URL=postgresql://me:hunter2@db/x\0HOME=/root")
    body = {"kind": "files", "options": {"files": [str(tmp_path / "environ")], "format": "tsv"}}
    problem = assert_problem(api.put(PATH, json=body), 422, "source-failed", "no column 'key'")
    assert "hunter2" not in json.dumps(problem)


def test_what_opens_a_presigned_file_is_shown_to_nobody(api: httpx.Client) -> None:
    url = "https://files.example/rows.jsonl?X-Amz-Signature=hunter2&X-Amz-Expires=60"
    body = {"kind": "files", "options": {"files": [url, "s3://bucket/part-?.csv"]}}
    kept = api.put(PATH, json=body, params={"check": False}).json()
    assert kept["options"]["files"] == ["https://files.example/rows.jsonl?…", "s3://bucket/part-?.csv"]
    for path in (PATH, "/console/collections/docs", "/v1/collections/docs"):
        answer = api.get(path)
        assert answer.status_code == 200
        assert "hunter2" not in answer.text, path


def read_push(engine: Engine, run: str, collection: str = "docs") -> list[Item]:
    from uuid import UUID

    place = SourcePlace(engine, Settings(), Registry({}), collection=collection, run_id=UUID(run))
    return [item for batch in open_source(Source(PUSH, {}), place).read() for item in batch]


@pytest.mark.parametrize("gzip", [False, True])
def test_what_is_pushed_waits_for_an_indexer_as_a_run(client: Client, engine: Engine, gzip: bool) -> None:
    client.set_source("docs", "push")
    items: list[Any] = [{"key": f"k{n}", "text": "x" * 50, "metadata": {"b": n, "a": 1}} for n in range(6000)]
    pushed = client.push("docs", items, complete=True, gzip=gzip)
    assert (pushed["num_items"], pushed["is_complete"]) == (6000, True)
    found = read_push(engine, pushed["run"])
    assert found == [Item(f"k{n}", b"x" * 50, b'{"a":1,"b":%d}' % n) for n in range(6000)]
    run = execute(engine, "SELECT kind, state, options FROM vectormill.runs").one()
    assert tuple(run) == ("reindex", "queued", {"num_parts": 2, "is_complete": True})


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"key": "a", "text": "x"}\n{"key": "a", "text": "y"}\n', 422, "duplicate-key"),
        (b'{"key": "a", "text": "x"}\nnonsense\n', 400, "invalid-json"),
        (b'{"key": "a", "text": "x", "metadata": {"x": "\\u0000"}}\n', 422, InvalidItem.code),
        (b"", 422, "empty-job"),
    ],
)
def test_a_push_that_is_refused_leaves_a_failed_run_and_nothing_else(
    client: Client, api: httpx.Client, engine: Engine, content: bytes, status: int, code: str
) -> None:
    client.set_source("docs", "push")
    assert_problem(api.post("/v1/collections/docs/push", content=content, headers=NDJSON), status, code)
    assert execute(engine, "SELECT state FROM vectormill.runs").scalar_one() == "failed"
    assert count(engine, "run_parts") == 0


def test_a_push_whose_connection_breaks_leaves_a_failed_run_and_no_parts(
    client: Client, api: httpx.Client, engine: Engine
) -> None:
    client.set_source("docs", "push")
    head = (
        "POST /v1/collections/docs/push HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-ndjson\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    block = lines(many(20_000))
    with socket.create_connection((api.base_url.host, api.base_url.port or 80)) as connection:
        connection.sendall(head.encode() + b"%x\r\n" % len(block) + block + b"\r\n")
        wait_for(lambda: count(engine, "run_parts") > 0)
    wait_for(lambda: count(engine, "run_parts") == 0)
    assert execute(engine, "SELECT state FROM vectormill.runs").scalar_one() == "failed"


def test_pairs_are_pushed_to_a_collection_of_scores_and_to_no_other(
    client: Client, engine: Engine, api: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair: ItemJson = {"key": "a", "text": "x", "text_pair": "y"}
    client.set_source("docs", "push")
    refused = api.post("/v1/collections/docs/push", content=lines([dict(pair)]), headers=NDJSON)
    assert_problem(refused, 422, InvalidItem.code, "Line 1", "text_pair is only for items of the task score")
    submit(engine, make_items(1), collection="judged", spec=SCORES)
    client.set_source("judged", "push")
    pushed = client.push("judged", [pair, {"key": "b", "text": "z"}])
    found = read_push(engine, pushed["run"], "judged")
    assert [(item.key, item.text) for item in found] == [("a", join_pair(b"x", b"y")), ("b", b"z")]
    (tmp_path / "rows.csv").write_text("key,text,answer\na,x,y\n")
    file = (str(tmp_path / "rows.csv"), "--pair-field", "answer", "--api-url", client.base_url)
    assert run("push", "judged", *file) == 0
    (item,) = read_push(engine, capsys.readouterr().out.strip(), "judged")
    assert item.text == join_pair(b"x", b"y")
    client.set_source("judged", "push", split={"by": "paragraphs"})
    with pytest.raises(ApiError, match="and not for passages"):
        client.push("judged", [pair])


def test_a_query_of_pairs_is_for_a_collection_of_scores(
    client: Client, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(engine, make_items(1), collection="judged", spec=SCORES)
    query = ("--sql", "SELECT 1 AS id, 'a text' AS question, 'an answer' AS answer", "--key", "id")
    columns = ("--text", "question", "--text-pair", "answer")
    server = ("--api-url", client.base_url)
    assert run("sources", "set", "judged", *query, *columns, *server) == 0
    assert "1\ta text\tan answer\t" in capsys.readouterr().out
    assert run("sources", "set", "docs", *query, *columns, *server) != 0
    assert "remove text_pair" in capsys.readouterr().err
    with pytest.raises(ApiError, match="remove text_pair"):
        client.set_source("docs", "sql", {**QUERY, "text_pair": "text"}, check=False)


def test_nothing_is_pushed_to_a_source_that_is_read(client: Client) -> None:
    client.set_source("docs", "sql", QUERY)
    with pytest.raises(ApiError, match="of kind sql, which runs read themselves"):
        client.push("docs", [{"key": "a", "text": "x"}])


def test_the_command_line_sets_shows_checks_deletes_and_pushes(
    api: httpx.Client,
    engine: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VECTORMILL_API_URL", str(api.base_url))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# A title\n\nAnd a text.")
    split = ("--split", "paragraphs:10:40")
    assert run("sources", "set", "docs", "--tree", "docs/", "--include", "**/*.md", *split) == 0
    shown = capsys.readouterr()
    assert "a.md#0" in shown.out
    assert "Read all 2 rows" in shown.err or "Read all 1 rows" in shown.err
    assert run("sources", "show", "docs", "--json") == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["options"] == {"folder": str(tmp_path / "docs"), "include": ["**/*.md"]}
    assert kept["split"] == {"by": "paragraphs", "min_chars": 10, "max_chars": 40}
    assert run("sources", "check", "docs") == 0
    (tmp_path / "rows.jsonl").write_bytes(lines(many(3)))
    assert run("sources", "set", "docs", "--files", "*.jsonl", "--key", "key", "--text", "text") == 0
    assert run("sources", "set", "docs", "--sql", QUERY["query"]) == 0
    capsys.readouterr()
    assert run("sources", "set", "docs", "--push") == 0
    assert capsys.readouterr().err == "The source has no rows yet.\n"
    assert run("push", "docs", "rows.jsonl", "--complete") == 0
    pushed = capsys.readouterr()
    assert "3 rows are waiting for an indexer" in pushed.err
    assert [item.key for item in read_push(engine, pushed.out.strip())] == ["k0", "k1", "k2"]
    assert run("sources", "delete", "docs") == 0
    assert run("sources", "show", "docs") == 2


@pytest.fixture
def papers(engine: Engine, api: httpx.Client) -> None:
    """A table that the source of the collection is a query of."""
    execute(engine, "CREATE TABLE public.papers (id bigint, body text)")
    options = {"query": "SELECT id, body FROM papers", "key": "id", "text": "body"}
    assert api.put(PATH, json={"kind": "sql", "options": options}).status_code == 200


def test_a_table_is_followed_looked_at_and_let_go(engine: Engine, api: httpx.Client, papers: None) -> None:
    with Client(str(api.base_url)) as client:
        assert client.following("docs")["table"] is None
        followed = client.follow("docs")
        assert (followed["table"], followed["key_column"], followed["waiting_changes"]) == (
            "public.papers",
            "id",
            0,
        )
        execute(engine, "INSERT INTO papers VALUES (1, 'one'), (2, 'two')")
        assert client.following("docs")["waiting_changes"] == 2
        assert client.unfollow("docs") == {
            "collection": "docs", "table": None, "key_column": None, "waiting_changes": 0, "lag_seconds": 0.0
        }  # fmt: skip


def test_what_cannot_be_followed_is_a_problem(engine: Engine, api: httpx.Client, papers: None) -> None:
    path = "/v1/collections/docs/source/follow"
    assert_problem(api.post(path, json={"table": "nothing"}), 422, "invalid-option", "no table 'nothing'")
    assert_problem(api.post(path, json={"table": "a\x00"}), 422, "invalid-option", "is not a valid name")
    assert_problem(api.post(path, json={"key_column": "x"}), 422, "invalid-option", "no column 'x'")
    assert_problem(api.post(path, json={"tables": "x"}), 422, "invalid-request", "unknown field `tables`")
    assert_problem(api.get("/v1/collections/none/source/following"), 404, "collection-not-found")
    execute(engine, "DELETE FROM vectormill.sources")
    assert_problem(api.post(path, json={}), 404, "source-not-found")


def test_a_table_that_a_long_transaction_holds_is_not_waited_for_long(
    engine: Engine, api: httpx.Client, papers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.sources.PATIENCE_SECONDS", 0.2)
    with engine.connect() as writing:
        writing.execute(text("INSERT INTO papers VALUES (1, 'one')"))
        answer = api.post("/v1/collections/docs/source/follow", json={})
        assert answer.status_code in (409, 503), answer.text
        writing.commit()
    assert api.post("/v1/collections/docs/source/follow", json={}).status_code == 200
