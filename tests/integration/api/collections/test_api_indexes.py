"""Indexes over HTTP, by the client and on the command line, with an indexer behind the API."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from indexer.main import serve
from indexer.reindexing import open_run_source
from tests.api_server import api_client, assert_problem
from tests.commands import run
from tests.indexed import draw_vectors, make_collection
from vectormill.client import Client
from vectormill.models.registry import Registry
from vectormill.settings import Settings

PATH = "/v1/collections/docs/index"


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    make_collection(engine, draw_vectors(1500))
    with api_client(engine, index_rows=1000) as client:
        yield client


@contextmanager
def indexing(database_url: str) -> Iterator[None]:
    """An indexer at work."""
    settings, stop = Settings(index_rows=1000, heartbeat_seconds=0.5), threading.Event()
    thread = threading.Thread(
        target=serve, args=(settings, database_url, Registry({}), stop, open_run_source), name="indexer"
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_what_would_be_built_is_told_with_its_reasons(api: httpx.Client) -> None:
    found = api.get(PATH).json()
    assert (found["policy"], found["num_rows"], found["indexes"], found["progress"]) == (
        "auto",
        1500,
        [],
        None,
    )
    assert found["plan"]["operator_class"] == "halfvec_cosine_ops"
    assert any("maintenance_work_mem" in reason for reason in found["plan"]["reasons"])
    assert_problem(api.get("/v1/collections/nothing/index"), 404, "collection-not-found")


def test_a_wish_is_kept_and_answered_by_the_run_that_fulfils_it(
    api: httpx.Client, engine: Engine, database_url: str
) -> None:
    with Client(str(api.base_url)) as client, indexing(database_url):
        seen: list[Mapping[str, Any]] = []
        run = client.set_index("docs", m=8, filters=["lang", "lang", "a.b"])
        assert (run["kind"], run["state"]) == ("index", "queued")
        run = client.wait_run(run["id"], seen.append, poll_seconds=0.1, timeout_seconds=120)
        assert run["state"] == "completed", run
        assert len(run["report"]["indexing"]["built"]) == 5  # one of vectors, and two for each field
        found = client.index("docs")
        assert (found["options"], found["filters"]) == ({"m": 8}, ["lang", "a.b"])
        assert {index["method"] for index in found["indexes"]} == {"hnsw", "btree"}
        assert all(index["is_valid"] for index in found["indexes"])
        assert found["built"]["m"] == 8
        run = client.wait_run(client.set_index("docs", drop=True, filters=[])["id"], timeout_seconds=120)
        assert run["report"]["indexing"]["dropped"]
        assert client.index("docs")["policy"] == "none"
        assert client.index("docs")["indexes"] == []


def test_wishes_that_cannot_be_are_refused_and_nothing_is_kept(api: httpx.Client) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"drop": True, "rebuild": True}, "invalid-option", "dropped and requested"),
        ({"drop": True, "policy": "hnsw"}, "invalid-option", "dropped and requested"),
        ({"m": 40, "ef_construction": 50}, "invalid-option", "twice m"),
        ({"filters": ["a..b"]}, "invalid-option", "Invalid field 'a..b'"),
        ({"filters": ["a\0b"]}, "invalid-option", "cannot store"),
        ({"m": 1}, "invalid-request", "m"),
        ({"policy": "ivf"}, "invalid-request", "policy"),
    ]
    for body, code, said in cases:
        assert_problem(api.put(PATH, json=body), 422, code, said)
        found = api.get(PATH).json()
        assert (found["policy"], found["options"], found["filters"]) == ("auto", {}, [])
        assert api.get("/v1/runs").json()["data"] == []


def test_what_is_kept_with_an_older_wish_counts(api: httpx.Client) -> None:
    assert api.put(PATH, json={"m": 40}).status_code == 202
    assert_problem(api.put(PATH, json={"ef_construction": 50}), 422, "invalid-option", "m, which is 40")


def test_the_command_shows_builds_and_waits(
    api: httpx.Client, engine: Engine, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ("--api-url", str(api.base_url))
    assert run("collections", "index", "docs", *url) == 0
    assert "Policy auto, 1,500 rows." in capsys.readouterr().out
    with indexing(database_url):
        assert run("collections", "index", "docs", "--on", "lang", "--wait", *url) == 0
    shown = capsys.readouterr()
    assert "is completed." in shown.out
    assert "Built generation_1_hnsw_1 in" in shown.out
    assert "m = 16 and ef_construction = 64" in shown.out
    assert "completed" in shown.err
    assert run("collections", "index", "docs", *url) == 0
    assert "ready" in capsys.readouterr().out
