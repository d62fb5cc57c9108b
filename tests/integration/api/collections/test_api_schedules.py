"""Schedules over HTTP, by the client and by the command line, on a real API and a real Postgres."""

from collections.abc import Iterator
from datetime import datetime, timedelta

import httpx
import pytest
from sqlalchemy import Engine, text

from scheduler.main import fire_due_schedules
from tests.api_server import api_client, assert_problem
from tests.commands import Say, saying
from tests.database import execute
from tests.schedules import make_collection, make_due, make_schedule
from vectormill.client import Client


@pytest.fixture
def http(engine: Engine) -> Iterator[httpx.Client]:
    make_collection(engine, "docs")
    with api_client(engine) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[Client]:
    with Client(str(http.base_url)) as client:
        yield client


@pytest.fixture
def run(http: httpx.Client, capsys: pytest.CaptureFixture[str]) -> Say:
    return saying(http, capsys)


def end_runs(engine: Engine, state: str, error: str | None = None) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.runs SET state = :state, error = :error, finished_at = now()"),
            {"state": state, "error": error},
        )


def test_a_schedule_is_made_looked_at_changed_and_deleted(client: Client) -> None:
    made = client.create_schedule("docs", "0 2 * * *", timezone="Europe/Berlin")
    assert (made["name"], made["overlap"], made["lag_seconds"]) == ("docs", "skip", 0.0)
    local = datetime.fromisoformat(made["next_due_local"] or "")
    assert (local.hour, local.minute) == (2, 0)
    assert local == datetime.fromisoformat(made["next_due_at"] or "")
    client.create_schedule("docs", "@hourly", name="often", overlap="queue")
    assert [schedule["name"] for schedule in client.schedules()] == ["docs", "often"]
    changed = client.change_schedule("docs", cron="30 4 * * *", timezone="UTC")
    assert (changed["next_due_at"] or "")[11:16] == "04:30"
    assert client.schedule("docs") | {"lag_seconds": 0.0} == changed
    client.delete_schedule("often")
    assert [schedule["name"] for schedule in client.schedules()] == ["docs"]


def test_a_paused_schedule_is_not_due(client: Client) -> None:
    client.create_schedule("docs", "0 2 * * *")
    paused = client.pause_schedule("docs")
    assert (paused["paused_at"] is None, paused["next_due_at"], paused["next_due_local"]) == (
        False,
        None,
        None,
    )
    assert client.resume_schedule("docs")["next_due_at"] is not None


def test_the_history_has_runs_and_skips_by_page(engine: Engine, http: httpx.Client, client: Client) -> None:
    client.create_schedule("docs", "0 2 1 6 *")
    asked = client.run_schedule("docs")
    for seconds in (2, 1):
        make_due(engine, "docs", timedelta(seconds=seconds))
        fire_due_schedules(engine)
    history = list(client.schedule_runs("docs"))
    assert [run["state"] for run in history] == ["skipped", "skipped", "queued"]
    assert asked["id"] in (history[0]["error"] or "")
    assert (history[2]["id"], history[2]["due_at"]) == (asked["id"], None)
    page = http.get("/v1/schedules/docs/runs", params={"limit": 2}).json()
    rest = http.get("/v1/schedules/docs/runs", params={"limit": 2, "after": page["next"]}).json()
    assert [run["id"] for run in page["data"] + rest["data"]] == [run["id"] for run in history]
    assert rest["next"] is None


def test_a_request_that_cannot_be_met_is_refused_with_its_reason(http: httpx.Client) -> None:
    cases: list[tuple[dict[str, str], int, str, str]] = [
        ({"collection": "docs", "cron": "0 2 * *"}, 422, "invalid-option", "4 fields, not 5"),
        ({"collection": "docs", "cron": "0 25 * * *"}, 422, "invalid-option", "invalid hour"),
        (
            {"collection": "docs", "cron": "@daily", "timezone": "Mars/X"},
            422,
            "invalid-option",
            "Unknown time zone",
        ),
        (
            {"collection": "docs", "cron": "@daily", "name": "a\x00"},
            422,
            "invalid-option",
            "Invalid schedule name",
        ),
        ({"collection": "none", "cron": "@daily"}, 404, "collection-not-found", "no collection"),
        ({"collection": "docs\x00", "cron": "@daily"}, 404, "collection-not-found", "no collection"),
        (
            {"collection": "docs", "cron": "@daily", "overlap": "x"},
            422,
            "invalid-request",
            "overlap: Invalid enum value 'x'",
        ),
        (
            {"collection": "docs", "cron": "@daily", "zone": "x"},
            422,
            "invalid-request",
            "unknown field `zone`",
        ),
    ]
    for body, status, code, said in cases:
        assert_problem(http.post("/v1/schedules", json=body), status, code, said)


def test_a_name_is_taken_once_and_one_that_is_none_is_not_found(http: httpx.Client) -> None:
    body = {"collection": "docs", "cron": "@daily"}
    answer = http.post("/v1/schedules", json=body)
    assert (answer.status_code, answer.headers["location"]) == (201, "/v1/schedules/docs")
    assert_problem(http.post("/v1/schedules", json=body), 409, "conflict", "already")
    for path in ("/v1/schedules/nightly", "/v1/schedules/%00", "/v1/schedules/nightly/runs"):
        assert_problem(http.get(path), 404, "schedule-not-found")


def test_readyz_counts_schedules_that_fail_and_stays_ready(engine: Engine, http: httpx.Client) -> None:
    for name in ("docs", "late", "paused"):
        make_schedule(engine, name, "0 2 1 6 *", collection="docs")
    http.post("/v1/schedules/paused/pause")
    make_due(engine, "docs")
    fire_due_schedules(engine)
    end_runs(engine, "failed", "The table is gone.")
    make_due(engine, "late", timedelta(minutes=5))
    answer = http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["schedules"] == {"schedules": 3, "paused": 1, "failing": 1, "overdue": 1}


def test_metrics_tell_of_each_schedule(engine: Engine, http: httpx.Client) -> None:
    make_schedule(engine, "docs", "0 2 1 6 *")
    make_due(engine, "docs", timedelta(minutes=5))
    said = http.get("/metrics").text
    assert 'vectormill_schedule_consecutive_failures{collection="docs",schedule="docs"} 0.0' in said
    assert "vectormill_schedule_last_success_timestamp_seconds{" not in said
    lag = said.partition('vectormill_schedule_lag_seconds{collection="docs",schedule="docs"} ')[2].split()[0]
    assert 300 <= float(lag) < 400
    fire_due_schedules(engine)
    end_runs(engine, "completed")
    said = http.get("/metrics").text
    assert "vectormill_schedule_last_success_timestamp_seconds{" in said
    assert 'vectormill_schedule_next_due_timestamp_seconds{collection="docs"' in said


def test_the_list_says_why_the_last_due_time_had_no_run_and_what_to_do(engine: Engine, run: Say) -> None:
    make_schedule(engine, "docs", "0 2 1 6 *")
    for _ in range(2):
        make_due(engine, "docs")
        fire_due_schedules(engine)
        execute(engine, "UPDATE vectormill.runs SET state = 'held' WHERE state = 'queued'")
        execute(engine, "UPDATE vectormill.runs SET due_at = due_at - interval '1 minute'")
    said = run("schedules", "list")
    assert "\tskipped\t" in said
    assert "`vectormill runs confirm " in said


def test_the_command_line_makes_shows_and_deletes_a_schedule(run: Say) -> None:
    said = run("schedules", "create", "docs", "--cron", "0 2 * * *", "--timezone", "Asia/Kolkata")
    assert "02:00 Asia/Kolkata (" in said
    assert "20:30 UTC)" in said  # of the day before, which is named
    assert "docs\tdocs\t0 2 * * *\t" in run("schedules", "list")
    assert "paused since" in run("schedules", "pause", "docs")
    assert "next due\t" in run("schedules", "resume", "docs")
    assert "30 4 * * * (UTC)" in run(
        "schedules", "change", "docs", "--cron", "30 4 * * *", "--timezone", "UTC"
    )
    run_id = run("schedules", "run-now", "docs").strip()
    assert f"\n{run_id}\tby hand\tqueued" in run("schedules", "history", "docs")
    assert '"cron": "30 4 * * *"' in run("schedules", "show", "docs", "--json")
    run("schedules", "delete", "docs")
    assert "no schedule 'docs'" in run("schedules", "show", "docs", code=2)


def test_a_schedule_is_made_with_its_source_in_one_command(engine: Engine, client: Client, run: Say) -> None:
    execute(engine, "CREATE TABLE public.articles (id bigint, body text)")
    execute(engine, "INSERT INTO articles VALUES (1, 'one')")
    query = "SELECT id, body FROM articles"
    source = ("--source", query, "--key", "id", "--text", "body")
    said = run("schedules", "create", "docs", "--cron", "@daily", *source)
    assert "0 0 * * * (UTC)" in said
    assert client.source("docs")["options"] == {"query": query, "key": "id", "text": "body"}
    assert "no column 'key'" in run(
        "schedules", "create", "docs", "--cron", "@daily", "--source", query, code=2
    )
