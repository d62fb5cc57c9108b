"""Jobs over HTTP: a real server, a real Postgres."""

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import Engine, text

from api.app import create_app
from tests.api_server import api_client, encode_waiting, serving
from tests.services import connected_engine, migrated_database
from vectormill.db.session import make_engine
from vectormill.settings import Settings

JOB_FIELDS = {
    "id", "state", "model", "collection", "priority", "num_items", "num_done", "num_failed", "num_chunks",
    "num_retried_chunks", "num_tokens", "truncated_items", "created_at", "started_at", "finished_at",
    "items_per_second", "tokens_per_second", "eta_seconds", "padding_waste", "stage_seconds", "options", "metadata",
}  # fmt: skip
ITEMS = [{"key": "a", "text": "one"}, {"key": "b", "text": "two", "metadata": {"page": 2}}]
NDJSON = {"Content-Type": "application/x-ndjson"}
# The stand-in worker of the tests makes vectors of eight dimensions.
SMALL = {"dimensions": 8}


LIMITS = {"chunk_max_items": 4, "max_json_bytes": 4096, "max_line_bytes": 2048}


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine, **LIMITS) as client:
        yield client


@pytest.fixture(scope="module")
def empty_engine(postgres_url: str) -> Iterator[Engine]:
    """For requests that are refused: one database for all of them, and it stays empty."""
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        yield engine


@pytest.fixture(scope="module")
def refusing_client(empty_engine: Engine) -> Iterator[httpx.Client]:
    with api_client(empty_engine, **LIMITS) as client:
        yield client
        assert count_jobs(empty_engine) == 0


def lines(items: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def many(count: int) -> list[dict[str, Any]]:
    return [{"key": f"k{number}", "text": f"text {number}"} for number in range(count)]


def long_items(count: int) -> list[dict[str, Any]]:
    """Enough bytes for more than one block of a stream, in few chunks."""
    return [{"key": f"k{number}", "text": "word " * 300} for number in range(count)]


def submit(client: httpx.Client, items: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    # json.dumps, unlike httpx, escapes a lone surrogate.
    content = json.dumps({"items": items, "options": SMALL, **body})
    answer = client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def count_jobs(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM vectormill.jobs")).scalar_one())


def wait_until(condition: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.01)


def assert_problem(answer: httpx.Response, status: int, code: str, *said: str) -> dict[str, Any]:
    problem: dict[str, Any] = answer.json()
    assert answer.status_code == problem["status"] == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"https://vectormill.dev/problems/{code}"
    for part in said:
        assert part in problem["detail"]
    return problem


def test_a_job_is_accepted_with_its_place_and_reads_the_same_there(client: httpx.Client) -> None:
    body = {
        "items": ITEMS,
        "collection": "docs",
        "priority": 3,
        "metadata": {"source": "é"},
        "options": SMALL,
    }
    answer = client.post("/v1/jobs", json=body)
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert answer.headers["retry-after"] == "1"
    assert set(job) == JOB_FIELDS
    assert (job["state"], job["num_items"], job["num_chunks"], job["priority"]) == ("queued", 2, 1, 3)
    assert (job["model"], job["collection"], job["metadata"]) == ("all-MiniLM-L6-v2", "docs", {"source": "é"})
    assert job["options"]["dimensions"] == 8
    assert job["created_at"].endswith("Z")
    assert client.get(answer.headers["location"]).json() == job
    assert client.get("/v1/jobs").json() == {"data": [job], "next": None}


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_stream_of_lines_is_the_same_job_as_the_json_object(client: httpx.Client, encoding: str) -> None:
    content = lines(ITEMS)
    parameters = {"collection": "docs", "priority": 3, "dimensions": 8, "metadata": '{"source":"é"}'}
    streamed = client.post(
        "/v1/jobs",
        content=gzip.compress(content) if encoding == "gzip" else content,
        headers=NDJSON | {"Content-Encoding": encoding},
        params=parameters,
    ).json()
    sent = submit(client, ITEMS, collection="docs", priority=3, metadata={"source": "é"})
    differing = {"id", "created_at"}
    assert {k: v for k, v in streamed.items() if k not in differing} == {
        k: v for k, v in sent.items() if k not in differing
    }


def test_every_option_of_a_stream_is_read_as_its_own_type(client: httpx.Client) -> None:
    parameters = (
        "normalize=false&dimensions=16&prompt=query%3A%20&max_tokens=32&truncate=false&model=all-MiniLM-L6-v2"
    )
    answer = client.post(f"/v1/jobs?{parameters}", content=lines(ITEMS), headers=NDJSON)
    options = answer.json()["options"]
    assert answer.status_code == 202
    assert (options["normalize"], options["dimensions"], options["truncate"]) == (False, 16, False)
    assert (options["prompt"], options["max_tokens"]) == ("query: ", 32)


def test_a_long_stream_becomes_many_chunks(client: httpx.Client) -> None:
    items = many(5000)
    answer = client.post(
        "/v1/jobs",
        content=iter([lines(items[:1]), lines(items[1:2500]), b"\n\n", lines(items[2500:])]),
        headers=NDJSON,
    )
    assert answer.status_code == 202
    assert (answer.json()["num_items"], answer.json()["num_chunks"]) == (5000, 1250)


@pytest.mark.parametrize(
    ("query", "place", "said"),
    [
        ("colection=docs", "colection", "there is no such query parameter"),
        ("priority=10", "priority", "<= 9"),
        ("priority=high", "priority", "Expected `int`"),
        ("truncate=maybe", "truncate", "Expected `bool"),
        ("model=a&model=b", "model", "more than once"),
        ("metadata=[1]", "metadata", "must be a JSON object"),
        ("metadata={", "metadata", "must be a JSON object"),
    ],
)
def test_a_wrong_query_parameter_is_refused_by_name(
    refusing_client: httpx.Client, query: str, place: str, said: str
) -> None:
    problem = refusing_client.post(f"/v1/jobs?{query}", content=lines(ITEMS), headers=NDJSON).json()
    assert problem["status"] == 422
    assert problem["errors"][0]["parameter"] == place
    assert said in problem["detail"]


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ('{"items": [{"key": "a", "text": "t"}', 400, "invalid-json", None),
        ('{"items": [], "itmes": []}', 422, "invalid-request", None),
        ('{"collection": "docs"}', 422, "invalid-request", None),
        ('{"items": [{"key": "a", "text": "t"}, {"key": "b"}]}', 422, "invalid-item", "/items/1"),
        ('{"items": [{"key": "a", "text": 7}]}', 422, "invalid-item", "/items/0/text"),
        ('{"items": [{"key": "", "text": "t"}]}', 422, "invalid-item", "/items/0/key"),
        ('{"items": [{"key": "\\ud800", "text": "t"}]}', 422, "invalid-item", "/items/0/key"),
        ('{"items": [{"key": "a", "text": "t"}], "priority": 11}', 422, "invalid-request", "/priority"),
        (
            '{"items": [{"key": "a", "text": "t"}], "options": {"pool": "cls"}}',
            422,
            "invalid-request",
            "/options",
        ),
        ('{"items": [{"key": "a", "text": "t"}], "options": {"dimensions": 0}}', 422, "invalid-option", None),
        (
            '{"items": [{"key": "a", "text": "t"}], "options": {"prompt": "\\u0000"}}',
            422,
            "invalid-option",
            None,
        ),
        ('{"items": [{"key": "a", "text": "t"}], "metadata": {"a": "\\u0000"}}', 422, "invalid-option", None),
        ('{"items": [{"key": "a", "text": "t"}], "collection": "No Name"}', 422, "invalid-option", None),
        ('{"items": [{"key": "a", "text": "t"}], "model": "nothing"}', 422, "unknown-model", None),
        ('{"items": []}', 422, "empty-job", None),
    ],
)
def test_a_wrong_body_is_refused_with_the_place_and_nothing_is_kept(
    refusing_client: httpx.Client,
    empty_engine: Engine,
    body: str,
    status: int,
    code: str,
    pointer: str | None,
) -> None:
    answer = refusing_client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    problem = assert_problem(answer, status, code)
    if pointer:
        assert problem["errors"][0]["pointer"] == pointer
    assert count_jobs(empty_engine) == 0


def test_an_unknown_model_is_refused_with_the_names_that_exist(refusing_client: httpx.Client) -> None:
    answer = refusing_client.post("/v1/jobs?model=bert", content=lines(ITEMS), headers=NDJSON)
    assert_problem(answer, 422, "unknown-model", "'bert'", "all-MiniLM-L6-v2")


def test_two_equal_keys_are_both_named(refusing_client: httpx.Client) -> None:
    items = [*many(16), {"key": "k2", "text": "again"}]
    answer = refusing_client.post("/v1/jobs", content=lines(items), headers=NDJSON)
    assert_problem(answer, 422, "duplicate-key", "3", "17")


def test_a_bad_line_late_in_a_stream_is_named_and_takes_the_parts_before_it_away(
    refusing_client: httpx.Client, empty_engine: Engine
) -> None:
    content = lines(long_items(400)) + b'{"key": "x"}\n' + lines(many(10))
    answer = refusing_client.post("/v1/jobs", content=content, headers=NDJSON)
    problem = assert_problem(answer, 422, "invalid-item", "Line 401")
    assert problem["errors"][0]["line"] == 401
    assert count_jobs(empty_engine) == 0


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({"Content-Type": "text/csv"}, b"a,b", 415, "unsupported-media-type"),
        (NDJSON | {"Content-Encoding": "br"}, b"", 415, "unsupported-encoding"),
        (NDJSON | {"Content-Encoding": "gzip"}, b"plain", 400, "invalid-gzip"),
        (NDJSON, b"", 422, "empty-job"),
        (NDJSON, b"\n \n", 422, "empty-job"),
        (NDJSON, b"x" * 3000, 413, "submission-too-large"),
        ({"Content-Type": "application/json"}, b"x" * 5000, 413, "submission-too-large"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b" " * 5000), 413, "submission-too-large"),
        (NDJSON | {"Idempotency-Key": "k" * 256}, b"", 422, "invalid-request"),
    ],
)
def test_a_body_that_cannot_be_a_job_is_refused(
    refusing_client: httpx.Client, headers: dict[str, str], content: bytes, status: int, code: str
) -> None:
    assert_problem(refusing_client.post("/v1/jobs", headers=headers, content=content), status, code)


def test_a_json_body_whose_length_is_not_declared_is_bounded_too(refusing_client: httpx.Client) -> None:
    answer = refusing_client.post("/v1/jobs", content=iter([b" " * 3000, b" " * 3000]))
    assert_problem(answer, 413, "submission-too-large", "4096 bytes")


def test_the_same_idempotency_key_answers_the_same_job_and_counts_once(
    client: httpx.Client, engine: Engine
) -> None:
    key = {"Idempotency-Key": "nightly-2026-11-21"}
    first = client.post("/v1/jobs", json={"items": ITEMS}, headers=key)
    again = client.post("/v1/jobs", json={"items": ITEMS}, headers=key)
    other = client.post("/v1/jobs", json={"items": ITEMS[:1]}, headers=key)
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    assert_problem(other, 422, "idempotency-mismatch")
    assert count_jobs(engine) == 1
    assert "vectormill_submitted_jobs_total 1.0" in client.get("/metrics").text


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(
    refusing_client: httpx.Client, empty_engine: Engine
) -> None:
    address = urlsplit(str(refusing_client.base_url))
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: api\r\nContent-Type: application/x-ndjson\r\n"
        b"Content-Length: 100000000\r\n\r\n"
    )
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(head + lines(long_items(400)))
        wait_until(lambda: count_jobs(empty_engine) == 1)
        assert refusing_client.get("/v1/jobs").json()["data"][0]["state"] == "uploading"
    wait_until(lambda: count_jobs(empty_engine) == 0)


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


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("state=done", "invalid-request"),  # a chunk's state, not a job's
        ("limit=0", "invalid-request"),
        ("limit=201", "invalid-request"),
        ("status=queued", "invalid-request"),  # silently ignored, it would list every job
        ("after=7", "invalid-cursor"),
    ],
)
def test_a_listing_refuses_what_it_does_not_understand(
    refusing_client: httpx.Client, query: str, code: str
) -> None:
    problem = assert_problem(refusing_client.get(f"/v1/jobs?{query}"), 422, code)
    assert problem["errors"][0]["parameter"] == query.partition("=")[0]


@pytest.mark.parametrize("job_id", ["00000000-0000-0000-0000-000000000000", "nothing"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("POST", "/cancel"),
        ("POST", "/retry"),
        ("GET", "/errors"),
        ("GET", "/vectors"),
        ("GET", "/events"),
    ],
)
def test_a_job_that_is_not_there_is_not_found(
    refusing_client: httpx.Client, method: str, path: str, job_id: str
) -> None:
    assert_problem(refusing_client.request(method, f"/v1/jobs/{job_id}{path}"), 404, "job-not-found")


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


def test_a_job_is_cancelled_once_and_a_completed_one_not_at_all(client: httpx.Client, engine: Engine) -> None:
    waiting = submit(client, ITEMS)["id"]
    assert client.post(f"/v1/jobs/{waiting}/cancel").json()["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{waiting}/cancel").json()["state"] == "cancelled"
    done = submit(client, ITEMS)["id"]
    encode_waiting(engine)
    assert_problem(client.post(f"/v1/jobs/{done}/cancel"), 409, "wrong-job-state", "completed")
    assert_problem(client.post(f"/v1/jobs/{done}/retry"), 409, "wrong-job-state")


def test_progress_is_streamed_until_the_job_has_ended(client: httpx.Client, engine: Engine) -> None:
    job = submit(client, ITEMS)
    with client.stream("GET", f"/v1/jobs/{job['id']}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        received = answer.iter_lines()
        assert next(line for line in received if line.startswith("event")) == "event: progress"
        encode_waiting(engine)
        rest = list(received)
    last = json.loads(rest[-2].removeprefix("data: "))
    assert "event: end" in rest
    assert set(last) == JOB_FIELDS
    assert (last["id"], last["state"], last["num_done"]) == (job["id"], "completed", 2)


def test_without_postgres_the_answer_is_to_come_again() -> None:
    engine = make_engine("postgresql://nobody@127.0.0.1:1/nothing", application_name="test")
    with (
        serving(create_app(Settings(), engine)) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        for answer in (client.post("/v1/jobs", json={"items": ITEMS}), client.get("/v1/jobs")):
            assert_problem(answer, 503, "database-unavailable")
            assert answer.headers["retry-after"]
    engine.dispose()
