"""A collection checked by an indexer: what is wrong is found and named, and the exit code tells."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import SMALL, api_client, encoding_meanwhile, many, submit
from tests.commands import run
from tests.database import execute
from tests.indexers import ListedSource, indexing
from vectormill.cli import exits
from vectormill.client import Client


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client, encoding_meanwhile(engine), indexing(engine, ListedSource()):
        body = {"name": "docs", "keep_text": True, "options": SMALL}
        assert client.post("/v1/collections", json=body).status_code == 201
        job = submit(client, many(60), collection="docs")
        with Client(str(client.base_url)) as ours:
            ours.wait(job["id"], poll_seconds=0.05)
        yield client


def check(api: httpx.Client, **options: Any) -> dict[str, Any]:
    with Client(str(api.base_url)) as client:
        run = client.wait_run(client.check_collection("docs", **options)["id"], timeout_seconds=60)
    assert run["state"] == "completed", run
    report: dict[str, Any] = run["report"]["checking"]
    return report


def change(engine: Engine, statement: str) -> None:
    table = execute(
        engine, "SELECT 'vectormill.generation_' || id FROM vectormill.generations WHERE state = 'live'"
    ).scalar_one()
    execute(engine, statement.format(table=table, attributes=f"{table}_attributes"))


def test_a_sound_collection_has_no_problems_and_its_report_says_what_was_looked_at(
    api: httpx.Client, engine: Engine
) -> None:
    change(engine, "CREATE INDEX fine ON {table} USING hnsw (embedding halfvec_cosine_ops)")
    report = check(api, sample=40)
    assert report["problems"] == []
    assert report["is_good"] is True
    assert report["vectors"]["num_rows"] == 60
    assert report["recall"]["index"] == "fine"
    assert report["recall"]["value"] > 0.95
    assert report["texts"]["num_compared"] == 40
    assert report["texts"]["smallest"] > 0.999
    assert report["hashes"] == {"num_compared": 60, "num_differing": 0, "differing_keys": []}
    assert "generation_1" in report["strays"]["view_reads"]
    assert report["unchecked"] == []


BROKEN = [
    ("UPDATE {table} SET embedding = '[0,0,0,0,0,0,0,0]' WHERE key = 'k3'", "no direction", "'k3'"),
    ("UPDATE {table} SET embedding = '[2,0,0,0,0,0,0,0]' WHERE key = 'k3'", "do not have length 1", "2.000"),
    (
        "UPDATE {table} SET embedding = '[1,0,0,0,0,0,0,0]' WHERE key = 'k3'",
        "less than 0.99",
        "'k3'",
    ),
    ("UPDATE {attributes} SET text = 'another' WHERE key = 'k4'", "do not match their vectors", "'k4'"),
    ("DELETE FROM {table} WHERE key = 'k5'", "have no row", "'k5'"),
    (
        "INSERT INTO vectormill.tombstones (collection_id, key, seq)"
        " SELECT id, 'k6', 1000 FROM vectormill.collections",
        "deleted keys still have rows",
        "'k6'",
    ),
    ("CREATE TABLE vectormill.generation_77 (key text)", "no collection", "generation_77"),
    ("CREATE OR REPLACE VIEW public.docs AS SELECT * FROM docs_was", "instead of the live", "view docs"),
    ("DROP VIEW docs", "no table of Vectormill", "view docs"),
]


def test_what_is_wrong_is_found_and_named(api: httpx.Client, engine: Engine) -> None:
    """Each fault comes on top of those before it."""
    change(engine, "CREATE TABLE docs_was AS SELECT * FROM docs")
    for statement, said, named in BROKEN:
        change(engine, statement)
        report = check(api, sample=200)
        assert report["is_good"] is False
        assert any(said in problem and named in problem for problem in report["problems"]), report["problems"]


def test_a_check_says_what_it_could_not_look_at(api: httpx.Client, engine: Engine) -> None:
    change(engine, "DELETE FROM {attributes}")
    report = check(api)
    assert report["is_good"] is True
    assert report["texts"]["reason"] == "texts of jobs that wrote to it"
    assert [sentence.partition(":")[0] for sentence in report["unchecked"]] == ["Hashes of texts", "Recall"]
    assert check(api, sample=0)["unchecked"][-1] == "Texts encoded again: none were requested."


def test_the_command_prints_a_table_and_its_exit_code_tells(
    api: httpx.Client, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("collections", "check", "docs", "--api-url", str(api.base_url)) == exits.SUCCESS
    shown = capsys.readouterr().out
    assert "60 rows, 0 invalid" in shown
    assert "No problems found." in shown
    change(engine, "UPDATE {table} SET embedding = '[0,0,0,0,0,0,0,0]' WHERE key = 'k3'")
    assert run("collections", "check", "docs", "--api-url", str(api.base_url)) == exits.ITEMS_FAILED
    assert "Problem: 1 vectors have no direction" in capsys.readouterr().out
