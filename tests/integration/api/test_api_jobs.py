"""Jobs over HTTP: found, listed, followed, cancelled, retried and deleted."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import anyio.to_thread
import httpx
import pytest
from sqlalchemy import Engine, event, text

from api.app import create_app
from api.door.scopes import OPERATIONS
from tests.api_server import (
    ITEMS,
    JOB_FIELDS,
    api_client,
    assert_problem,
    delete,
    encode_waiting,
    many,
    refusing_api,
    serving,
    submit,
)
from tests.database import ask, execute
from vectormill.keys import api_keys
from vectormill.operation import CONFIRMATION
from vectormill.settings import Settings
from vectormill.workers.workers import beat_worker


@pytest.fixture(scope="module")
def refusing_client(postgres_url: str) -> Iterator[httpx.Client]:
    with refusing_api(postgres_url) as (client, _):
        yield client


def test_pages_of_jobs_are_newest_first_and_lose_none(client: httpx.Client) -> None:
    ids = [submit(client, ITEMS)["id"] for _ in range(5)]
    client.post(f"/v1/jobs/{ids[2]}/cancel")
    first = client.get("/v1/jobs", params={"limit": 2}).json()
    second = client.get("/v1/jobs", params={"limit": 2, "after": first["next"]}).json()
    third = client.get("/v1/jobs", params={"limit": 2, "after": second["next"]}).json()
    assert [job["id"] for page in (first, second, third) for job in page["data"]] == ids[::-1]
    assert third["next"] is None
    cancelled = client.get("/v1/jobs", params={"state": "cancelled"}).json()
    assert [job["id"] for job in cancelled["data"]] == [ids[2]]


def test_jobs_are_listed_by_collection_and_time_of_submission(engine: Engine, client: httpx.Client) -> None:
    ids = [submit(client, ITEMS, collection=name)["id"] for name in ("docs", "docs", "tickets")]
    execute(engine, "UPDATE vectormill.jobs SET created_at = '2026-03-01T23:30Z' WHERE id = :id", id=ids[0])

    def listed(**query: str) -> list[int]:
        answer = client.get("/v1/jobs", params=query)
        assert answer.status_code == 200, answer.text
        return [ids.index(job["id"]) for job in answer.json()["data"]][::-1]

    assert listed(collection="docs") == [0, 1]
    assert listed(since="2026-03-02T00:00:00+01:00", until="2026-03-01T23:31:00Z") == [0]
    assert listed(until="2026-03-01T23:30:00Z") == [], "until is the first moment that does not count"
    assert listed(collection="docs", since="2026-03-01T23:31:00Z", state="queued") == [1]
    assert listed(collection="none") == []


def test_a_listing_refuses_what_it_does_not_understand(refusing_client: httpx.Client) -> None:
    for query, code in (
        ("state=done", "invalid-request"),  # a chunk's state, not a job's
        ("limit=0", "invalid-request"),
        ("limit=201", "invalid-request"),
        ("status=queued", "invalid-request"),  # silently ignored, it would list every job
        ("since=2026-03-01T00:00", "invalid-request"),  # of which zone?
        ("until=yesterday", "invalid-request"),
        ("collection=a%00b", "invalid-request"),
        ("after=7", "invalid-cursor"),
    ):
        problem = assert_problem(refusing_client.get(f"/v1/jobs?{query}"), 422, code)
        assert problem["errors"][0]["parameter"] == query.partition("=")[0]


def test_a_job_that_is_not_there_is_not_found(refusing_client: httpx.Client) -> None:
    for operation in OPERATIONS:
        if "{job_id}" in operation.path:
            for job_id in ("00000000-0000-0000-0000-000000000000", "nothing"):
                answer = refusing_client.request(
                    operation.method, operation.path.format(job_id=job_id), headers={CONFIRMATION: job_id}
                )
                assert_problem(answer, 404, "job-not-found")


# A second job whose id begins like that of the first.
COPY_JOB = text("""
    INSERT INTO vectormill.jobs OVERRIDING SYSTEM VALUE
    SELECT copy.* FROM vectormill.jobs
     CROSS JOIN LATERAL jsonb_populate_record(jobs, jsonb_build_object(
               'id', CAST(:copy_id AS text), 'seq', seq + 1000, 'state', CAST(:state AS text))) AS copy
     WHERE jobs.id = :job_id
""")


def test_the_first_eight_digits_of_an_id_name_the_job_unless_another_begins_so_too(
    client: httpx.Client, engine: Engine
) -> None:
    job_id = submit(client, many(3))["id"]
    encode_waiting(engine)
    short = f"/v1/jobs/{job_id[:8]}"
    whole = client.get(f"/v1/jobs/{job_id}").json()
    for prefix in (job_id[:8], job_id[:8].upper(), job_id[:9], job_id[:13], job_id.replace("-", "")[:31]):
        assert client.get(f"/v1/jobs/{prefix}").json()["id"] == job_id, prefix
    with client.stream("GET", f"{short}/events") as events:
        assert whole["id"] in "".join(events.iter_text())
    assert len(client.get(f"{short}/vectors").text.splitlines()) == 3
    assert_problem(client.get(f"/v1/jobs/{job_id[:7]}"), 404, "job-not-found", "at least the first 8 digits")
    copy_id = job_id[:-12] + ("0" * 12 if job_id[-12:] != "0" * 12 else "1" * 12)
    execute(engine, COPY_JOB, copy_id=copy_id, job_id=job_id, state="completed")
    for method in ("GET", "DELETE"):
        answer = client.request(method, short, headers={CONFIRMATION: job_id[:8]})
        assert_problem(answer, 404, "job-not-found", f"Several ids begin with {job_id[:8]}: ")
        assert job_id in answer.json()["detail"]
        assert copy_id in answer.json()["detail"]
    execute(engine, "UPDATE vectormill.jobs SET state = 'deleting' WHERE id = :id", id=copy_id)
    assert client.delete(short, headers={CONFIRMATION: job_id[:8]}).status_code == 204
    assert_problem(client.get(short), 404, "job-not-found", "may have been deleted")


def test_failed_items_are_listed_in_order_and_retried_alone(client: httpx.Client, engine: Engine) -> None:
    items = [
        *many(6),
        {"key": "nul", "text": "a\0b"},
        {"key": "blank", "text": " "},
        {"key": "half", "text": "\ud800"},
    ]
    job = submit(client, items)
    encode_waiting(engine)
    ended = client.get(f"/v1/jobs/{job['id']}").json()
    assert (ended["state"], ended["num_done"], ended["num_failed"]) == ("completed_with_errors", 6, 3)
    assert ended["eta_seconds"] == 0
    assert ended["items_per_second"] > 0

    path = f"/v1/jobs/{job['id']}/errors"
    first = client.get(path, params={"limit": 2}).json()
    second = client.get(path, params={"limit": 2, "after": first["next"]}).json()
    errors = first["data"] + second["data"]
    assert [(error["key"], error["code"]) for error in errors] == [
        ("nul", "nul_character"),
        ("blank", "empty_text"),
        ("half", "lone_surrogate"),
    ]
    assert set(errors[0]) == {"key", "code", "detail"}
    assert second["next"] is None

    retried = client.post(f"/v1/jobs/{job['id']}/retry").json()
    assert (retried["state"], retried["num_done"], retried["num_failed"]) == ("queued", 6, 0)


def test_a_job_is_deleted_when_it_has_ended_and_its_rows_in_a_collection_stay(
    client: httpx.Client, engine: Engine
) -> None:
    path = f"/v1/jobs/{submit(client, many(4), collection='docs')['id']}"
    assert_problem(delete(client, path), 409, "wrong-job-state", "queued; cancel it first, then delete it")
    encode_waiting(engine)
    answer = delete(client, path)
    assert (answer.status_code, answer.content) == (204, b"")
    for method, rest in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/vectors"),
        ("GET", "/errors"),
        ("POST", "/retry"),
    ):
        answer = client.request(method, path + rest, headers={CONFIRMATION: path.rpartition("/")[2]})
        assert_problem(answer, 404, "job-not-found", "may have been deleted")
    assert client.get("/v1/jobs").json()["data"] == []
    assert execute(engine, "SELECT count(*) FROM docs").scalar_one() == 4


def test_a_job_is_paused_and_resumed_as_often_as_one_likes_until_it_has_ended(
    client: httpx.Client, engine: Engine
) -> None:
    path = f"/v1/jobs/{submit(client, ITEMS)['id']}"
    assert client.post(f"{path}/resume").json()["state"] == "queued"  # it was not paused, and goes on anyway
    for _ in range(2):
        paused = client.post(f"{path}/pause").json()
        assert (paused["state"], paused["eta_seconds"]) == ("paused", None)
        assert paused["paused_at"] is not None
    assert encode_waiting(engine) == 0
    for _ in range(2):
        resumed = client.post(f"{path}/resume").json()
        assert (resumed["state"], resumed["paused_at"]) == ("queued", None)
    assert encode_waiting(engine) == 1
    for wish in ("pause", "resume", "cancel", "retry"):
        assert_problem(client.post(f"{path}/{wish}"), 409, "wrong-job-state", "The job is completed")


def test_every_answer_says_why_a_job_waits(client: httpx.Client, engine: Engine) -> None:
    job = submit(client, ITEMS)
    path = f"/v1/jobs/{job['id']}"
    missing = f"No live worker serves {job['model']}"
    assert missing in job["waiting_because"]
    assert missing in client.get(path).json()["waiting_because"]
    assert missing in client.get("/v1/jobs").json()["data"][0]["waiting_because"]
    assert "`vectormill resume" in client.post(f"{path}/pause").json()["waiting_because"]
    assert missing in client.post(f"{path}/resume").json()["waiting_because"]
    encode_waiting(engine)
    assert client.get(path).json()["waiting_because"] is None


def test_a_stream_of_progress_tells_when_a_job_waits_for_something_else(
    client: httpx.Client, engine: Engine
) -> None:
    job = submit(client, ITEMS)
    with client.stream("GET", f"/v1/jobs/{job['id']}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        assert "No live worker serves" in json.loads(next(data))["waiting_because"]
        ask(engine, beat_worker, "w", uuid4(), job["model"], 4, {"state": "loading"})
        assert "w is loading" in json.loads(next(data))["waiting_because"]
        encode_waiting(engine)
        last = json.loads(list(data)[-1])
    assert set(last) >= JOB_FIELDS
    assert (last["id"], last["state"], last["num_done"]) == (job["id"], "completed", 2)


def test_a_stream_of_progress_ends_when_the_server_is_told_to_stop(engine: Engine) -> None:
    with httpx.Client(trust_env=False, timeout=30) as client, ExitStack() as server:
        url = server.enter_context(serving(create_app(Settings(), engine), patience_seconds=None))
        client.base_url = url
        job = submit(client, ITEMS)
        with client.stream("GET", f"/v1/jobs/{job['id']}/events") as answer:
            received = answer.iter_lines()
            assert next(line for line in received if line.startswith("event")) == "event: progress"
            server.close()  # returns when no request is left: it would wait for ever for one that goes on
            assert not any(line.startswith("event") for line in received)


def test_a_small_job_costs_one_hop_to_a_thread_and_two_transactions(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 3600.0)
    begun: list[object] = []
    hops: list[object] = []
    to_thread = anyio.to_thread.run_sync

    async def note_hop(work: Any, *arguments: Any, **options: Any) -> Any:
        hops.append(work)
        return await to_thread(work, *arguments, **options)

    with api_client(engine) as client:
        submit(client, many(2), collection="docs")  # makes the collection, and reads the keys
        monkeypatch.setattr("anyio.to_thread.run_sync", note_hop)
        event.listen(engine, "begin", lambda connection: begun.append(connection))
        job = submit(client, many(2), collection="docs")
        assert (len(hops), len(begun)) == (1, 2)
    assert "No live worker serves" in job["waiting_because"]
