"""Requests that are made again under their Idempotency-Key, over HTTP: of files, pushes, runs and webhooks."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import Engine, text

from scheduler.pruner import Pruner
from tests.api_server import NDJSON, api_client, assert_problem, delete, lines, many
from tests.database import ask, execute
from tests.protocol import make_items, submit
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.db.idempotency import make_once
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.runs.operations import RunRequest

NEVER = 10**9
NUM_POSTS = 12
KEY = {"Idempotency-Key": "nightly"}
RUNS = "/v1/collections/docs/runs"
SCHEDULE = "/v1/schedules/docs/run"


def write_file(content: bytes) -> dict[str, Any]:
    return {"files": {"file": ("a.jsonl", content)}, "data": {"purpose": "batch"}}


@dataclass(frozen=True)
class Made:
    """What a request makes: its path, the request and another, the member of the answer that names it, its table."""

    path: str
    request: dict[str, Any]
    other: dict[str, Any]
    name: str
    table: str

    @property
    def refusal(self) -> int:
        """OpenAI's clients know 400 for what is 422 elsewhere."""
        return 400 if self.path == "/v1/files" else 422


# More rows than a part of a push has, and more bytes than a part of a file, so that both are written in parts.
ROWS = many(5000)
CASES = {
    "file": Made("/v1/files", write_file(b"x" * (3 << 20)), write_file(b"y"), "id", "request_files"),
    "file of another name": Made(
        "/v1/files",
        write_file(b"x"),
        {"files": {"file": ("b.jsonl", b"x")}, "data": {"purpose": "batch"}},
        "id",
        "request_files",
    ),
    "push": Made(
        "/v1/collections/docs/push",
        {"content": lines(ROWS), "headers": NDJSON},
        {"content": lines(ROWS[:-1]), "headers": NDJSON},
        "run",
        "runs",
    ),
    "push of all rows": Made(
        "/v1/collections/docs/push",
        {"content": lines(many(2)), "headers": NDJSON},
        {"content": lines(many(2)), "headers": NDJSON, "params": {"complete": "true"}},
        "run",
        "runs",
    ),
    "run": Made(RUNS, {"json": {"kind": "check"}}, {"json": {"kind": "reindex"}}, "id", "runs"),
    "webhook": Made(
        "/v1/webhooks",
        {"json": {"url": "https://example.com/hook"}},
        {"json": {"url": "https://example.com/other"}},
        "id",
        "webhooks",
    ),
}
EACH = pytest.mark.parametrize("made", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VECTORMILL_API_KEY", raising=False)
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)  # every request sees the keys as they are


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    submit(engine, make_items(1), collection="docs")
    with api_client(engine) as api:
        with Client(str(api.base_url)) as client:
            client.set_source("docs", "push")
        yield api


def post(
    api: httpx.Client, made: Made, request: dict[str, Any] | None = None, headers: dict[str, str] = KEY
) -> httpx.Response:
    sent = made.request if request is None else request
    return api.post(made.path, **sent | {"headers": sent.get("headers", {}) | headers})


def count(engine: Engine, table: str) -> int:
    # A file that is being removed is found by nobody.
    condition = "state <> 'deleting'" if table == "request_files" else "true"
    with engine.connect() as connection:
        counting = text(f"SELECT count(*) FROM vectormill.{table} WHERE {condition}")
        return int(connection.execute(counting).scalar_one())


@EACH
def test_a_repeated_request_answers_what_the_first_has_made(
    api: httpx.Client, engine: Engine, made: Made
) -> None:
    first, again = post(api, made), post(api, made)
    assert first.is_success, first.text
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again.headers.get("location") == first.headers.get("location")
    assert count(engine, made.table) == 1
    fresh = post(api, made, headers={"Idempotency-Key": "another"})
    assert fresh.json()[made.name] != first.json()[made.name]
    without = api.post(made.path, **made.request), api.post(made.path, **made.request)
    assert without[0].json()[made.name] != without[1].json()[made.name]


def test_a_run_that_was_started_before_dry_runs_existed_is_recognized(
    api: httpx.Client, engine: Engine
) -> None:
    made = api.post(RUNS, json={"kind": "check"}, headers=KEY).json()
    content = b"docs\n" + msgspec.json.encode({"kind": "check", "options": RunRequest().options})
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.idempotency_keys SET content_hash = :hash"),
            {"hash": hashlib.blake2b(content, digest_size=16).digest()},
        )
    assert api.post(RUNS, json={"kind": "check", "dry_run": False}, headers=KEY).json()["id"] == made["id"]


def test_a_schedule_runs_once_for_a_repeated_request(api: httpx.Client, engine: Engine) -> None:
    with Client(str(api.base_url)) as client:
        client.set_source("docs", "sql", {"query": "SELECT 1 AS key, 'one' AS text"})
        client.create_schedule("docs", "0 3 * * *")
    first, again, other = (
        api.post(SCHEDULE, headers=KEY | more) for more in ({}, {}, {"Idempotency-Key": "b"})
    )
    assert first.status_code == 202, first.text
    assert first.json()["id"] == again.json()["id"] != other.json()["id"]
    assert count(engine, "runs") == 2


@EACH
def test_the_same_key_with_another_body_is_refused_and_makes_nothing(
    api: httpx.Client, engine: Engine, made: Made
) -> None:
    first = post(api, made)
    assert_problem(post(api, made, made.other), made.refusal, "idempotency-mismatch")
    assert post(api, made).json() == first.json()
    if made.name == "run":  # a push that is refused is told of by a failed run, as ever
        execute(engine, "DELETE FROM vectormill.runs WHERE state = 'failed'")
    assert count(engine, made.table) == 1


@EACH
def test_requests_with_one_key_at_the_same_moment_make_one_thing(
    api: httpx.Client, engine: Engine, made: Made
) -> None:
    ready = Barrier(NUM_POSTS)

    def post_together(client: httpx.Client) -> httpx.Response:
        ready.wait(60)
        return post(client, made)

    # Two API processes, as behind a load balancer.
    with api_client(engine) as other, ThreadPoolExecutor(NUM_POSTS) as clients:
        answers = list(clients.map(post_together, [api, other] * (NUM_POSTS // 2)))
    assert {answer.is_success for answer in answers} == {True}, [answer.text for answer in answers]
    assert len({answer.json()[made.name] for answer in answers}) == 1
    assert count(engine, made.table) == 1
    assert count(engine, "idempotency_keys") == 1
    if made.name == "run":
        assert count(engine, "run_parts") == (2 if made.request["content"] == lines(ROWS) else 1)


@EACH
def test_two_api_keys_may_use_one_idempotency_key_for_two_things(
    api: httpx.Client, engine: Engine, made: Made
) -> None:
    answers = []
    for name in ("ours", "theirs"):
        secret = make_secret()
        ask(engine, create_key, name, secret, "admin", None)
        answers += [post(api, made, headers=KEY | {"Authorization": f"Bearer {secret}"}) for _ in range(2)]
    ours, ours_again, theirs, theirs_again = (answer.json()[made.name] for answer in answers)
    assert ours == ours_again != theirs == theirs_again


def test_one_key_may_be_used_for_each_kind_of_request(api: httpx.Client, engine: Engine) -> None:
    kinds = [CASES[name] for name in ("file", "push", "run", "webhook")]
    assert [post(api, made).is_success for made in kinds] == [True] * 4
    assert count(engine, "idempotency_keys") == 4


@pytest.mark.parametrize(
    ("path", "refused", "good"),
    [
        (
            "/v1/files",
            {"files": {"file": ("a", b"x")}, "data": {"purpose": "nonsense"}},
            write_file(b"x"),
        ),
        (
            "/v1/collections/docs/push",
            {"content": b'{"key": "a", "text": "x"}\n' * 2, "headers": NDJSON},
            {"content": lines(many(2)), "headers": NDJSON},
        ),
        (RUNS, {"json": {"kind": "check", "options": {"dimensions": 8}}}, {"json": {"kind": "check"}}),
        ("/v1/webhooks", {"json": {"url": "https://10.0.0.1/"}}, {"json": {"url": "https://example.com/"}}),
    ],
    ids=["file", "push", "run", "webhook"],
)
def test_a_request_that_was_refused_leaves_its_key_free(
    api: httpx.Client, engine: Engine, path: str, refused: dict[str, Any], good: dict[str, Any]
) -> None:
    made = Made(path, refused, good, "", "")
    assert post(api, made).status_code == made.refusal
    assert count(engine, "idempotency_keys") == 0
    answer = post(api, made, good)
    assert answer.is_success, answer.text


def test_a_transaction_that_fails_leaves_neither_the_thing_nor_its_key(engine: Engine) -> None:
    def fail() -> str:
        raise ConnectionError("the database went away")

    with pytest.raises(ConnectionError), engine.begin() as connection:
        make_once(connection, "run", "k", b"content", fail)
    assert ask(engine, make_once, "run", "k", b"other content", lambda: "made") == "made"


def test_a_repetition_waits_for_the_transaction_that_makes_the_first(engine: Engine) -> None:
    def repeat() -> str:
        return ask(engine, make_once, "run", "k", b"content", lambda: "second")

    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as connection:
            make_once(connection, "run", "k", b"content", lambda: "first")
            repeated = threads.submit(repeat)
            wait_for(lambda: is_waiting(engine))
        assert repeated.result(60) == "first"


def is_waiting(engine: Engine) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return bool(execute(engine, waiting).scalar_one())


def test_a_key_is_kept_for_a_day(api: httpx.Client, engine: Engine) -> None:
    made = CASES["webhook"]
    first = post(api, made)
    age_keys(engine, 23)
    Pruner(engine, NEVER, NEVER).prune()
    assert post(api, made).json() == first.json()
    age_keys(engine, 2)
    Pruner(engine, NEVER, NEVER).prune()
    assert count(engine, "idempotency_keys") == 0
    assert post(api, made).json()["id"] != first.json()["id"]


def age_keys(engine: Engine, hours: int) -> None:
    with engine.begin() as connection:
        older = (
            "UPDATE vectormill.idempotency_keys SET created_at = created_at - make_interval(hours => :hours)"
        )
        connection.execute(text(older), {"hours": hours})


def test_what_was_deleted_is_not_made_again_under_its_key(api: httpx.Client, engine: Engine) -> None:
    for made, code in ((CASES["file"], "request-file-not-found"), (CASES["webhook"], "webhook-not-found")):
        name = post(api, made).json()[made.name]
        delete(api, f"{made.path}/{name}").raise_for_status()
        assert_problem(post(api, made), 404, code)
        assert count(engine, made.table) == 0


def test_the_secret_of_a_webhook_that_was_rotated_is_not_shown_for_the_key_that_made_it(
    api: httpx.Client,
) -> None:
    made = CASES["webhook"]
    webhook = post(api, made).json()["id"]
    api.post(f"/v1/webhooks/{webhook}/rotate-secret", json={}).raise_for_status()
    answer = post(api, made)
    assert "whsec_" not in answer.text
    assert_problem(answer, 409, "conflict", "rotated")
