"""The console's pages of jobs over HTTP: what they list, what they refuse, and what they stream."""

import re
from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, encode_waiting
from tests.protocol import claim_next, complete, make_items, submit
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.jobs import cancel_job, find_job, pause_job
from vectormill.keys import keyring
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key

TOKEN = re.compile(r'"X-CSRF-Token": "([0-9a-f]{64})"')
FAILURE = ItemFailure("text-too-long", "Too <b>long</b>.")


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client:
        yield client


def test_jobs_are_listed_by_state_a_page_at_a_time(client: httpx.Client, engine: Engine) -> None:
    ids = [submit(engine, make_items(1), chunk_max_items=1).id for _ in range(53)]
    with engine.begin() as connection:
        pause_job(connection, ids[0])
    first = client.get("/console/jobs").text
    assert first.count('<tr id="job-') == 50
    (older,) = re.findall(r'href="(/console/jobs\?after=[0-9a-f]{16})"', first)
    assert client.get(older).text.count('<tr id="job-') == 3
    paused = client.get("/console/jobs?state=paused").text
    assert f'id="job-{ids[0]}"' in paused
    assert paused.count('<tr id="job-') == 1
    assert "No job is failed." in client.get("/console/jobs?state=failed").text
    assert client.get("/console/jobs?state=nonsense").status_code == 422
    assert client.get("/console/jobs?after=x").status_code == 422


def test_a_job_tells_its_errors_and_nothing_of_them_is_markup(client: httpx.Client, engine: Engine) -> None:
    job = submit(engine, make_items(240, "<i>"), chunk_max_items=240)
    complete(engine, claim_next(engine), dict.fromkeys(range(0, 240, 2), FAILURE))
    page = client.get(f"/console/jobs/{job.id}").text
    assert "&lt;i&gt;0" in page
    assert "Too &lt;b&gt;long" in page
    assert "<i>" not in page
    assert "hx-sse:connect" not in page  # it has ended: nothing is to come
    errors = client.get(f"/console/jobs/{job.id}/errors").text
    assert errors.count("text-too-long") == 100
    (following,) = re.findall(r'href="(/console/jobs/[^"]+after=[0-9a-f]{16})"', errors)
    assert client.get(following).text.count("text-too-long") == 20
    assert client.get(f"/console/jobs/{uuid4()}").status_code == 404
    assert client.get("/console/jobs/nonsense").status_code == 404


def test_a_stream_tells_a_job_until_its_end(client: httpx.Client, engine: Engine) -> None:
    job = submit(engine, make_items(8))
    seen = ""
    with client.stream("GET", f"/console/jobs/{job.id}/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if not seen:
                encode_waiting(engine)
            seen += line + "\n"
    assert "0 of 8 texts" in seen
    assert "8 of 8 texts" in seen
    assert seen.rstrip().endswith("event: end\ndata:")


def test_a_session_of_scope_read_looks_and_takes_results_and_presses_nothing(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "FRESH_SECONDS", 0.0)
    job = submit(engine, make_items(8))
    complete(engine, claim_next(engine))
    secrets = {scope: make_secret() for scope in ("read", "write")}
    with engine.begin() as connection:
        for scope, secret in secrets.items():
            create_key(connection, scope, secret, scope)
    for scope, status, state in (("read", 403, "running"), ("write", 200, "paused")):
        client.cookies.clear()
        (csrf,) = re.findall(r'name="csrf" value="([0-9a-f]{64})"', client.get("/console/login").text)
        client.post("/console/login", data={"csrf": csrf, "key": secrets[scope]})
        page = client.get(f"/console/jobs/{job.id}").text
        assert ("disabled aria-describedby" in page) == (scope == "read")
        token = {"X-CSRF-Token": TOKEN.findall(page)[0], "HX-Request": "true"}
        assert client.post(f"/console/jobs/{job.id}/pause", headers=token).status_code == status
        with engine.connect() as connection:
            assert find_job(connection, job.id).state == state
        lines = client.get(f"/console/jobs/{job.id}/results?format=ndjson").text.splitlines()
        assert len(lines) == 4
        assert client.post(f"/console/jobs/{job.id}/nonsense", headers=token).status_code in (403, 404)


def test_what_a_job_cannot_do_any_more_is_a_notice_in_the_words_of_the_api(
    client: httpx.Client, engine: Engine
) -> None:
    job = submit(engine, make_items(2))
    token = {
        "X-CSRF-Token": TOKEN.findall(client.get(f"/console/jobs/{job.id}").text)[0],
        "HX-Request": "true",
    }
    with engine.begin() as connection:
        cancel_job(connection, job.id)
    answer = client.post(f"/console/jobs/{job.id}/pause", headers=token)
    assert (answer.status_code, answer.headers["hx-retarget"]) == (409, "#notices")
    assert "The job is cancelled" in answer.text
