"""The console's schedules on a real API: what the pages say, and what their buttons do."""

import re
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import Engine, text

from scheduler.schedules import fire_due_schedules
from tests.api_server import api_client
from tests.schedules import list_runs, make_collection, make_due, make_schedule
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.schedules.due_times import run_schedule_now
from vectormill.schedules.schedules import delete_schedule
from vectormill.workers.workers import beat_indexer, beat_scheduler

TOKEN = re.compile(r'"X-CSRF-Token": "([0-9a-f]{64})"')


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    make_collection(engine, "docs")
    make_schedule(engine, "docs", "0 2 * * *", timezone="Europe/Berlin")
    with api_client(engine) as client:
        yield client


def press(client: httpx.Client, path: str) -> httpx.Response:
    (token,) = TOKEN.findall(client.get("/console/schedules").text)
    return client.post(path, headers={"X-CSRF-Token": token, "HX-Request": "true"})


def words_of(answer: httpx.Response) -> str:
    """The text of a page, without its tags."""
    assert answer.status_code == 200, answer.text
    return " ".join(re.sub(r"<[^>]+>", " ", answer.text).split())


def end_runs(engine: Engine, state: str, error: str | None = None, **counts: int) -> None:
    numbers = "".join(f", {name} = {number}" for name, number in counts.items())
    with engine.begin() as connection:
        connection.execute(
            text(f"""
                UPDATE vectormill.runs
                   SET state = :state, error = :error, finished_at = now(),
                       started_at = now() - interval '90 s'{numbers}
                 WHERE finished_at IS NULL
            """),
            {"state": state, "error": error},
        )


def test_a_page_without_schedules_says_how_one_is_made(engine: Engine) -> None:
    with api_client(engine) as client:
        page = client.get("/console/schedules")
    assert "vectormill schedules create" in page.text
    assert 'aria-current="page">Schedules' in page.text


def test_the_list_tells_when_each_is_due_and_how_it_stands(client: httpx.Client) -> None:
    said = words_of(client.get("/console/schedules"))
    assert "0 2 * * * Europe/Berlin on time" in said
    assert "02:00 Europe/Berlin" in said
    assert "All schedules are in time" in said


def test_a_late_schedule_says_why_and_what_to_start(client: httpx.Client, engine: Engine) -> None:
    make_due(engine, "docs", timedelta(hours=1))
    said = words_of(client.get("/console/schedules"))
    assert "no scheduler gives a sign of life; start `vectormill scheduler`" in said
    assert "docs docs 0 2 * * * Europe/Berlin late" in said
    with engine.begin() as connection:
        beat_scheduler(connection)
    assert "the scheduler is alive but has not come to it" in words_of(client.get("/console/schedules"))
    fire_due_schedules(engine)
    said = words_of(client.get("/console/schedules/docs"))
    assert "waits: no indexer gives a sign of life; start `vectormill indexer`" in said
    with engine.begin() as connection:
        beat_indexer(connection)
    said = words_of(client.get("/console/schedules/docs"))
    assert "waits: an indexer takes it when nothing else works on the collection" in said


def test_the_history_tells_counts_durations_and_reasons(client: httpx.Client, engine: Engine) -> None:
    press(client, "/console/schedules/docs/run")
    end_runs(engine, "completed", num_seen=1200, num_new=3)
    press(client, "/console/schedules/docs/run")
    end_runs(engine, "failed", "The source <b>cannot</b> be read.")
    page = client.get("/console/schedules/docs")
    said = words_of(page)
    assert "asked for completed" in said
    assert "1 min 30 s 1,200 seen, 3 new" in said
    assert "Failed once since its last success. The source" in said
    assert "&lt;b&gt;cannot&lt;/b&gt;" in page.text  # what a source says is text
    assert "docs docs 0 2 * * * Europe/Berlin failed" in words_of(client.get("/console/schedules"))


def test_buttons_pause_resume_and_run_it_and_answer_how_it_stands(
    client: httpx.Client, engine: Engine
) -> None:
    assert "Paused since" in words_of(press(client, "/console/schedules/docs/pause"))
    assert "paused" in words_of(client.get("/console/schedules"))
    resumed = press(client, "/console/schedules/docs/resume")
    assert "Paused since" not in resumed.text
    assert "Pause" in resumed.text
    assert "queued" in words_of(press(client, "/console/schedules/docs/run"))
    (run,) = list_runs(engine, "docs")
    assert run.state == "queued"


def test_what_is_not_there_cannot_be_pressed(client: httpx.Client) -> None:
    assert press(client, "/console/schedules/docs/explode").status_code == 404
    assert press(client, "/console/schedules/none/pause").status_code == 404
    assert client.get("/console/schedules/none").status_code == 404
    assert client.get("/console/schedules?after=%00").status_code == 422


def test_who_may_only_read_sees_no_buttons_and_cannot_press(client: httpx.Client, engine: Engine) -> None:
    secret = make_secret()
    with engine.begin() as connection:
        run_schedule_now(connection, "docs")
        create_key(connection, "reader", secret, "read")
    page = client.get("/console/login")
    (csrf,) = re.findall(r'name="csrf" value="([0-9a-f]{64})"', page.text)
    client.post("/console/login", data={"csrf": csrf, "key": secret})
    for path in ("/console/schedules/docs", "/console/collections/docs"):
        shown = client.get(path).text
        assert 'hx-post="/console/schedules' not in shown
        assert 'hx-post="/console/runs' not in shown
    assert press(client, "/console/schedules/docs/pause").status_code == 403
    (run,) = list_runs(engine, "docs")
    assert press(client, f"/console/runs/{run.id}/cancel").status_code == 403


def test_a_look_at_a_schedule_follows_it_to_its_end(client: httpx.Client, engine: Engine) -> None:
    with client.stream("GET", "/console/live/schedules/docs") as answer:
        lines = answer.iter_lines()
        assert any("Due next at" in line for line in lines)
        with engine.begin() as connection:
            delete_schedule(connection, "docs")
        rest = "\n".join(lines)
    assert "Schedule docs is gone" in rest
    assert "event: end" in rest


def hold_run(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.runs SET state = 'held', phase = 'comparing', error = 'Many.'")
        )


@pytest.mark.parametrize("page", ["/console/schedules/docs", "/console/collections/docs"])
def test_a_run_that_is_held_is_confirmed_or_cancelled_where_it_is_listed(
    client: httpx.Client, engine: Engine, page: str
) -> None:
    press(client, "/console/schedules/docs/run")
    (run,) = list_runs(engine, "docs")
    confirm, cancel = (f"/console/runs/{run.id}/{wish}" for wish in ("confirm", "cancel"))
    waiting = client.get(page).text
    assert (confirm in waiting, cancel in waiting) == (False, True)
    refused = press(client, confirm)
    assert (refused.status_code, refused.headers["hx-retarget"]) == (409, "#notices")
    hold_run(engine)
    held = client.get(page).text
    assert (confirm in held, cancel in held) == (True, True)
    assert press(client, confirm).status_code == 204
    assert [each.state for each in list_runs(engine, "docs")] == ["queued"]
    hold_run(engine)
    assert press(client, cancel).status_code == 204
    assert [each.state for each in list_runs(engine, "docs")] == ["cancelled"]
    ended = client.get(page).text
    assert (confirm in ended, cancel in ended) == (False, False)
    assert press(client, f"/console/runs/{run.id}/forget").status_code == 404
