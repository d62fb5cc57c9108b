"""Runs over HTTP, by the client and by the command line: started, looked at, listed, cancelled, confirmed."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, assert_problem, encoding_meanwhile
from tests.commands import run as run_command
from tests.database import execute
from tests.indexers import ListedSource, indexing, make_collection, start_run
from tests.protocol import make_items
from vectormill.client import Client
from vectormill.problems import ApiError
from vectormill.runs.run import RunCounts


@pytest.fixture
def http(engine: Engine) -> Iterator[httpx.Client]:
    make_collection(engine)
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")
    with api_client(engine) as http:
        yield http


@pytest.fixture
def client(http: httpx.Client) -> Iterator[Client]:
    with Client(str(http.base_url)) as client:
        yield client


def test_a_client_starts_a_run_and_waits_for_its_end(engine: Engine, client: Client) -> None:
    told: list[str] = []
    with indexing(engine, ListedSource(make_items(5))), encoding_meanwhile(engine):
        started = client.reindex("docs")
        run = client.wait_run(started["id"], lambda run: told.append(run["state"]), poll_seconds=0.05)
    assert [(each["state"], each["phase"]) for each in (started, run)] == [
        ("queued", None),
        ("completed", None),
    ]
    assert client.collection("docs")["runs"][0]["phase"] is None
    assert run["counts"] == {**dict.fromkeys(run["counts"], 0), "num_seen": 5, "num_new": 5}
    assert set(run["counts"]) == set(RunCounts.__dataclass_fields__)
    assert run["report"]["comparing"] == {"num_rows": 0, "num_vanished": 0}
    assert told[-1] == "completed"
    assert client.job(run["job_id"] or "")["metadata"] == {"run": run["id"]}


def test_runs_are_listed_newest_first_page_by_page(
    engine: Engine, http: httpx.Client, client: Client
) -> None:
    make_collection(engine, "others")
    ids = [str(start_run(engine, name)) for name in ("docs", "others", "docs")]
    assert client.run(ids[1][:8])["id"] == ids[1]
    assert [run["id"] for run in client.runs()] == ids[::-1]
    assert [run["id"] for run in client.runs("docs")] == [ids[2], ids[0]]
    page = http.get("/v1/runs", params={"limit": 2}).json()
    assert [run["id"] for run in page["data"]] == ids[:0:-1]
    rest = http.get("/v1/runs", params={"limit": 2, "after": page["next"]}).json()
    assert ([run["id"] for run in rest["data"]], rest["next"]) == ([ids[0]], None)


def test_a_run_that_waits_is_cancelled_at_once_and_only_a_held_one_is_confirmed(
    http: httpx.Client, client: Client
) -> None:
    run = client.reindex("docs", max_change_share=0.5)
    assert run["options"] == {"priority": 5, "max_change_share": 0.5}
    assert_problem(http.post(f"/v1/runs/{run['id']}/confirm"), 409, "wrong-run-state", "is queued")
    assert client.cancel_run(run["id"])["state"] == "cancelled"
    assert client.cancel_run(run["id"])["state"] == "cancelled"
    assert client.run(run["id"])["finished_at"] is not None


def test_what_a_run_cannot_be_asked_for_is_refused(http: httpx.Client) -> None:
    cases: list[tuple[dict[str, object], int, str]] = [
        ({"options": {"max_change_share": 2}}, 422, "invalid-request"),
        ({"options": {"model": "none"}}, 422, "unknown-model"),
        ({"options": {"prompt": "\0"}}, 422, "invalid-request"),
        ({"options": {"colour": "red"}}, 422, "invalid-request"),
        ({"kind": "index", "options": {"dimensions": 8}}, 422, "invalid-option"),
        ({"kind": "other"}, 422, "invalid-request"),
    ]
    for body, status, code in cases:
        assert_problem(http.post("/v1/collections/docs/runs", json=body), status, code)
        assert http.get("/v1/runs").json()["data"] == []


def test_a_collection_without_source_or_texts_has_nothing_to_read(engine: Engine, client: Client) -> None:
    make_collection(engine, "bare")
    with pytest.raises(ApiError, match="no source and stores no texts"):
        client.reindex("bare")
    assert client.start_run("bare", "check")["kind"] == "check"
    with pytest.raises(ApiError, match="There is no collection 'missing'"):
        client.reindex("missing")
    with pytest.raises(ApiError, match="no run with this id"):
        client.run("7")


def test_the_command_line_follows_a_run_and_says_what_it_came_to(
    engine: Engine, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ("--api-url", str(http.base_url))

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_command(*arguments, *url), *capsys.readouterr()

    source = ListedSource(make_items(5))
    with indexing(engine, source), encoding_meanwhile(engine):
        code, out, err = run("reindex", "docs")
        assert (code, "completed" in out, "5 new" in err) == (0, True, True)
        source.items = []
        code, out, err = run("reindex", "docs")
        assert code == 4
        assert "held" in out
        run_id = out.splitlines()[0].split("\t")[1]
        assert f"vectormill runs confirm {run_id}" in err
        assert run("runs", "confirm", run_id)[0] == 0
        code, out, err = run("runs", "show", run_id, "--watch")
        assert (code, "num_deleted\t5" in out) == (0, True)
        source.items = [*make_items(2), replace(make_items(1)[0], key="bare", text=b"")]
        code, out, err = run("reindex", "docs")
        assert (code, "1 failed" in err) == (1, True)
        assert "\nbare\tempty_text" in run(*err.splitlines()[-1].split("`")[1].split()[1:])[1]
    code, out, _ = run("runs", "list")
    assert (code, len(out.splitlines())) == (0, 4)
