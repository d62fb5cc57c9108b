"""What is too much is refused with the limit's name and its setting, and what is refused leaves nothing behind."""

import gzip
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from api.limits.gates import Gate
from tests.api_server import (
    ITEMS,
    NDJSON,
    api_client,
    assert_problem,
    count_jobs,
    counted_client,
    lines,
    many,
    submit,
)
from tests.waiting import wait_for
from vectormill.collections.collection import RESERVED_WORDS

JSON = {"Content-Type": "application/json"}
NDJSON_HEADERS = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"


def is_in(gate: Gate, amount: int) -> None:
    """Waits until so much is inside: what is sent on a socket has been read at the other end."""
    wait_for(lambda: gate.inside == amount, because=f"{amount} are inside")


@contextmanager
def hanging_upload(client: httpx.Client) -> Iterator[socket.socket]:
    """An upload whose body has begun and does not go on."""
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as upload:
        upload.sendall(NDJSON_HEADERS + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + b'{"key\r\n')
        upload.settimeout(20)
        yield upload


def read_answer(connection: socket.socket) -> str:
    """Everything until the server closes the connection."""
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer.decode()


def assert_limit(answer: httpx.Response, status: int, setting: str, value: float) -> None:
    code = {413: "submission-too-large", 409: "too-many-collections"}.get(status, "limit-reached")
    problem = assert_problem(answer, status, code, setting)
    if status != 409:
        assert problem["limit"] == {"setting": setting, "value": value}
    assert ("retry-after" in answer.headers) == (status == 429)


def test_an_upload_that_falls_silent_is_ended_and_leaves_nothing(engine: Engine) -> None:
    with api_client(engine, body_idle_seconds=0.2) as client, hanging_upload(client) as upload:
        answer = read_answer(upload)
        assert answer.startswith("HTTP/1.1 408 ")
        problem = json.loads(answer.partition("\r\n\r\n")[2])
        assert problem["type"].endswith("/body-timeout")
        assert "0.2 s (VECTORMILL_BODY_IDLE_SECONDS)" in problem["detail"]
        assert count_jobs(engine) == 0


@pytest.mark.parametrize("sent", [b"", b"GET /v1/jo", NDJSON_HEADERS])
def test_a_connection_without_a_whole_head_is_closed(engine: Engine, sent: bytes) -> None:
    with (
        api_client(engine, body_idle_seconds=0.2) as client,
        socket.create_connection((client.base_url.host, client.base_url.port or 80), 20) as connection,
    ):
        connection.sendall(sent)
        assert connection.recv(1000) == b""


def test_more_submissions_at_once_than_allowed_are_asked_to_come_again(engine: Engine) -> None:
    with counted_client(engine, max_uploads=1) as (client, gates):
        with hanging_upload(client):
            is_in(gates.uploads, 1)
            assert_limit(client.post("/v1/jobs", json={"items": ITEMS}), 429, "VECTORMILL_MAX_UPLOADS", 1)
            assert client.get("/v1/jobs").status_code == 200
        is_in(gates.uploads, 0)  # the client that left has given its place back
        assert client.post("/v1/jobs", json={"items": ITEMS}).status_code == 202


def test_more_quotes_that_read_for_long_than_allowed_are_asked_to_come_again(engine: Engine) -> None:
    query = {"kind": "sql", "options": {"query": "SELECT 'a' AS key, 'b' AS text"}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/quotes", query),
        ("/v1/collections/docs/runs", {"dry_run": True}),
        ("/v1/jobs", {"input": {"urls": ["file:///nothing.jsonl"]}, "dry_run": True}),
    ]
    with counted_client(engine, max_quotes=1) as (client, gates):
        client.post("/v1/collections", json={"name": "docs", "keep_text": True}).raise_for_status()
        for path, body in asked:
            with gates.quotes.enter():
                assert_limit(client.post(path, json=body), 429, "VECTORMILL_MAX_QUOTES", 1)
                assert client.post("/v1/jobs", json={"items": ITEMS, "dry_run": True}).status_code == 200
            assert client.post(path, json=body).status_code != 429
            assert gates.quotes.inside == 0


def test_a_full_process_refuses_requests_and_still_answers_probes(engine: Engine) -> None:
    with (
        counted_client(engine, max_requests=2) as (client, gates),
        hanging_upload(client),
        hanging_upload(client),
    ):
        is_in(gates.requests, 2)
        assert_limit(client.get("/v1/jobs"), 429, "VECTORMILL_MAX_REQUESTS", 2)
        assert client.get("/livez").status_code == 200
        assert client.get("/readyz").status_code == 200


def test_watchers_are_limited_and_a_watcher_that_leaves_makes_room(engine: Engine) -> None:
    with counted_client(engine, max_watchers=2) as (client, gates):
        path = f"/v1/jobs/{submit(client, ITEMS)['id']}/events"
        with client.stream("GET", path), client.stream("GET", path):
            is_in(gates.watchers, 2)
            assert_limit(client.get(path), 429, "VECTORMILL_MAX_WATCHERS", 2)
        is_in(gates.watchers, 0)
        with client.stream("GET", path) as answer:
            assert answer.status_code == 200


def test_a_job_of_too_many_items_is_refused_in_either_form(engine: Engine) -> None:
    with api_client(engine, max_job_items=5, chunk_max_items=2) as client:
        submit(client, many(5))
        assert_limit(client.post("/v1/jobs", json={"items": many(6)}), 413, "VECTORMILL_MAX_JOB_ITEMS", 5)
        streamed = client.post("/v1/jobs", content=lines(many(6)), headers=NDJSON)
        assert_limit(streamed, 413, "VECTORMILL_MAX_JOB_ITEMS", 5)
        assert count_jobs(engine) == 1


def test_a_job_of_too_many_bytes_is_refused_whether_or_not_they_are_compressed(engine: Engine) -> None:
    body = lines(many(200))
    with api_client(engine, max_job_bytes=len(body)) as client:
        assert client.post("/v1/jobs", content=body, headers=NDJSON).status_code == 202
        for content, headers in (
            (body + b"\n", NDJSON),
            (gzip.compress(body + b"\n"), NDJSON | {"Content-Encoding": "gzip"}),
        ):
            answer = client.post("/v1/jobs", content=content, headers=headers)
            assert_limit(answer, 413, "VECTORMILL_MAX_JOB_BYTES", len(body))
        assert count_jobs(engine) == 1


def test_when_too_much_waits_a_job_is_asked_to_come_later_and_taken_when_there_is_room(
    engine: Engine,
) -> None:
    with api_client(engine, max_pending_items=8) as client:
        first = {"items": many(6)}
        key = {"Idempotency-Key": "the first"}
        assert client.post("/v1/jobs", json=first, headers=key).status_code == 202
        answer = client.post("/v1/jobs", json={"items": many(3)})
        assert_limit(answer, 429, "VECTORMILL_MAX_PENDING_ITEMS", 8)
        assert int(answer.headers["retry-after"]) >= 10
        streamed = client.post("/v1/jobs", content=lines(many(3)), headers=NDJSON)
        assert_limit(streamed, 429, "VECTORMILL_MAX_PENDING_ITEMS", 8)
        # What was answered before is answered again: it adds nothing.
        assert client.post("/v1/jobs", json=first, headers=key).status_code == 202
        assert client.post("/v1/jobs", json={"items": many(2)}).status_code == 202
        assert count_jobs(engine) == 2


def test_json_bodies_share_a_bound_of_memory(engine: Engine) -> None:
    half = b" " * (300 << 10)  # more than a block of a body, so that it counts before the rest is there
    whole = half + json.dumps({"items": ITEMS}).encode()
    with counted_client(engine, max_json_bytes_at_once=500 << 10) as (client, gates):
        with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as slow:
            head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(head + b"Content-Length: %d\r\n\r\n" % (400 << 10) + half)
            wait_for(lambda: gates.json_bytes.inside > 200 << 10)
            answer = client.post("/v1/jobs", content=whole, headers=JSON)
            assert_limit(answer, 429, "VECTORMILL_MAX_JSON_BYTES_AT_ONCE", 500 << 10)
            submit(client, ITEMS)  # a small one finds room
        is_in(gates.json_bytes, 0)
        assert client.post("/v1/jobs", content=whole, headers=JSON).status_code == 202
        is_in(gates.json_bytes, 0)
        alone = client.post("/v1/jobs", content=b" " * (501 << 10), headers=JSON)
        assert_limit(alone, 413, "VECTORMILL_MAX_JSON_BYTES_AT_ONCE", 500 << 10)


def test_searches_that_wait_are_counted_too(engine: Engine, redis_url: str) -> None:
    with counted_client(engine, max_searches=1, search_timeout_seconds=1, redis_url=redis_url) as (
        client,
        gates,
    ):
        submit(client, many(3), collection="docs")
        path = "/v1/collections/docs/search"
        with ThreadPoolExecutor(1) as others:
            waiting = others.submit(client.post, path, json={"text": "no worker lives"})
            is_in(gates.searches, 1)
            answer = client.post(path, json={"embedding": [1] * 8})
            assert_limit(answer, 429, "VECTORMILL_MAX_SEARCHES", 1)
            assert waiting.result().status_code == 503


def test_collections_are_limited_and_those_that_exist_go_on(engine: Engine) -> None:
    with api_client(engine, max_collections=2) as client:
        for name in ("ants", "bees", "ants"):
            submit(client, ITEMS, collection=name)
        answer = client.post("/v1/jobs", json={"items": ITEMS, "collection": "eels"})
        assert_limit(answer, 409, "VECTORMILL_MAX_COLLECTIONS", 2)
        submit(client, ITEMS)


def test_a_word_of_postgres_names_no_collection(engine: Engine) -> None:
    with api_client(engine) as client:
        for name, said in (("order", "reserved word"), ("pg_class", "reserved for Postgres")):
            answer = client.post("/v1/jobs", json={"items": ITEMS, "collection": name})
            assert_problem(answer, 422, "invalid-option", name, said)
        assert count_jobs(engine) == 0


def test_the_reserved_words_are_those_of_postgres(engine: Engine) -> None:
    with engine.connect() as connection:
        words = connection.execute(text("SELECT word FROM pg_get_keywords() WHERE catcode IN ('R', 'T')"))
        assert set(words.scalars()) == RESERVED_WORDS
