"""Faults of Redis and Postgres that pass: jobs wait with a reason, go on by themselves, and nothing is lost."""

import random
from urllib.parse import unquote
from uuid import uuid4

import httpx
import psycopg
import pytest
from sqlalchemy import make_url

from tests.acceptance import tiny
from tests.acceptance.parts import Parts, frozen
from tests.acceptance.producer import Promise, answers, assert_kept, promise
from tests.acceptance.relay import relay
from tests.waiting import wait_for
from vectormill.broker.app import make_app, queue_of
from vectormill.broker.queues import publish
from vectormill.jobs.chunk import Dispatch
from vectormill.jobs.job import TERMINAL_JOB_STATES
from vectormill.processes.lifetimes import free_port

pytestmark = [pytest.mark.timeout(300), pytest.mark.tail]

ITEMS = 200  # four chunks


def leased(parts: Parts, kept: Promise) -> int:
    """How many chunks of the job workers hold."""
    ((count,),) = parts.query(
        f"SELECT count(*) FROM vectormill.chunks WHERE state = 'leased' AND job_id = '{kept.job_id}'"
    )
    return int(str(count))


def waiting_because(parts: Parts, kept: Promise) -> str:
    with parts.client() as client:
        return str(client.job(kept.job_id)["waiting_because"] or "")


def test_concurrent_jobs_with_the_same_keys_leave_the_newest_texts(parts: Parts, collection: str) -> None:
    dice = random.Random(5)
    keys = [f"same{number}" for number in range(ITEMS)]
    kept = []
    with frozen(parts.runners()), parts.client() as client:  # so that all are encoded side by side
        for _ in range(4):
            numbers = dice.sample(range(tiny.NUM_TEXTS), ITEMS)
            dice.shuffle(keys)
            job = client.submit(tiny.items(numbers, keys), model=tiny.MODEL, collection=collection)
            kept.append(Promise(job["id"], collection, list(keys), numbers))
    assert_kept(parts, *kept)


def test_a_message_that_comes_three_times_or_late_changes_nothing(parts: Parts, collection: str) -> None:
    kept = promise(parts, list(range(ITEMS)), collection)
    with parts.client() as client:
        client.wait(kept.job_id, timeout_seconds=120)
    running = promise(parts, list(range(500, 500 + ITEMS)))
    replay(parts, kept)
    replay(parts, running)
    before = written(parts, kept, collection)
    wait_until_redis_is_empty(parts)
    assert written(parts, kept, collection) == before
    assert_kept(parts, kept, running)


def replay(parts: Parts, kept: Promise) -> None:
    """Every message of the job three times, with its own dispatch number and with old ones."""
    dice = random.Random(7)
    rows = parts.query(
        "SELECT chunks.id, chunks.dispatch_seq, jobs.id, chunks.seq, chunks.num_items, jobs.model, jobs.priority"
        f" FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = job_id WHERE job_id = '{kept.job_id}'"
    )
    dispatches = [Dispatch(*row) for row in rows for _ in range(3)]  # type: ignore[arg-type]
    assert dispatches
    dice.shuffle(dispatches)
    with make_app(parts.redis_url) as app:
        publish(app, dispatches)


def wait_until_redis_is_empty(parts: Parts) -> None:
    """Until every message was taken and acknowledged."""
    with parts.redis() as redis:
        lists = [queue_of(tiny.MODEL), queue_of(tiny.MODEL) + "\x06\x169"]
        wait_for(
            lambda: not any(redis.llen(name) for name in lists) and not redis.hlen("unacked"),
            60,
            "every message was taken",
        )


def written(parts: Parts, kept: Promise, collection: str) -> list[object]:
    """Which transaction wrote each row of the job, its chunks and its collection."""
    return [
        *parts.query(
            f"SELECT id, fence, xmin::text FROM vectormill.chunks WHERE job_id = '{kept.job_id}' ORDER BY 1"
        ),
        *parts.query(f"SELECT num_done, xmin::text FROM vectormill.jobs WHERE id = '{kept.job_id}'"),
        *parts.query(f"SELECT key, job_seq, xmin::text FROM {vector_table(parts, collection)} ORDER BY 1"),
    ]


def vector_table(parts: Parts, collection: str) -> str:
    ((name,),) = parts.query(
        "SELECT 'vectormill.' || quote_ident(table_name) FROM information_schema.view_table_usage"
        f" WHERE view_name = '{collection}' AND table_name NOT LIKE '%attributes'"
    )
    return str(name)


def test_jobs_wait_with_a_reason_while_redis_is_full_and_go_on_when_it_is_not(parts: Parts) -> None:
    with parts.redis() as redis:
        limit = redis.config_get("maxmemory")["maxmemory"]
        redis.config_set("maxmemory", "1")
        try:
            kept = promise(parts, list(range(ITEMS)))  # 202: submitting needs no Redis
            wait_for(lambda: "Redis" in waiting_because(parts, kept), 60, "the job says what it waits for")
        finally:
            redis.config_set("maxmemory", limit)
    assert_kept(parts, kept)


def test_jobs_wait_while_postgres_is_read_only_and_go_on_when_it_is_not(
    parts: Parts, collection: str
) -> None:
    with frozen(parts.runners()):
        kept = [promise(parts, list(range(ITEMS)), collection), promise(parts, list(range(ITEMS)))]
        for each in kept:
            wait_for(lambda each=each: leased(parts, each) > 0, 60, "workers hold chunks")  # type: ignore[misc]
        set_read_only(parts, "on")
        wait_for(lambda: is_read_only(parts), because="the servers' processes have read the setting")
    try:
        wait_for(lambda: has_lapsed(parts), 60, "a lease could not be renewed")
        refused = httpx.post(
            f"{parts.api_url}/v1/jobs",
            json={"model": tiny.MODEL, "items": [{"key": "a", "text": "b"}]},
            timeout=60,
        )
        assert refused.status_code == 503, refused.text
        assert "read-only" in refused.json()["detail"], refused.text
        with parts.client() as client:
            states = {client.job(each.job_id)["state"] for each in kept}
        assert states.isdisjoint(TERMINAL_JOB_STATES)
    finally:
        set_read_only(parts, "off")
    assert_kept(parts, *kept)


def set_read_only(parts: Parts, value: str) -> None:
    parts.change(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    parts.change("SELECT pg_reload_conf()")


def is_read_only(parts: Parts) -> bool:
    with psycopg.connect(parts.database_url.replace("postgresql+psycopg", "postgresql")) as connection:
        return connection.execute("SHOW transaction_read_only").fetchone() == ("on",)


def has_lapsed(parts: Parts) -> bool:
    return bool(
        list(parts.query("SELECT 1 FROM vectormill.chunks WHERE state = 'leased' AND lease_until < now()"))
    )


def test_a_submission_whose_commit_reply_is_lost_is_one_job(parts: Parts) -> None:
    key, port = str(uuid4()), free_port()
    url = make_url(parts.database_url)
    folder, number = unquote(str(url.query.get("host", ""))), url.query.get("port", url.port)
    target = f"{folder}/.s.PGSQL.{number}" if folder else (str(url.host), int(str(number)))
    cuts: list[bytes] = []
    behind = url.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
    api_port = free_port()
    body = {"model": tiny.MODEL, "items": tiny.items(list(range(50)))}
    headers = {"Idempotency-Key": key}
    with relay(("127.0.0.1", port), target, lambda: CommitOfSubmission(cuts)):
        parts.start("api-2", "api", "--port", str(api_port), environment={"VECTORMILL_DATABASE_URL": behind})
        try:
            cut_off = f"http://127.0.0.1:{api_port}"
            wait_for(lambda: answers(cut_off), 60, "the second API is there")
            first = httpx.post(f"{cut_off}/v1/jobs", json=body, headers=headers, timeout=60)
            assert len(cuts) == 1, "no reply of a COMMIT was lost"
            assert first.status_code in (202, 503), first.text
            again = httpx.post(f"{parts.api_url}/v1/jobs", json=body, headers=headers, timeout=60)
            assert again.status_code == 202, again.text
        finally:
            parts.end_part("api-2")
    numbers = list(range(50))
    assert_kept(parts, Promise(again.json()["id"], None, [f"k{number}" for number in numbers], numbers))
    assert list(parts.query(f"SELECT count(*) FROM vectormill.jobs WHERE idempotency_key = '{key}'")) == [
        (1,)
    ]


class CommitOfSubmission:
    """Of one connection: says of the COMMIT that makes a job visible that it is the last; once for all connections."""

    def __init__(self, cuts: list[bytes]) -> None:
        self._cuts = cuts
        self._has_queued = False

    def __call__(self, piece: bytes) -> bool:
        self._has_queued |= b"SET state = 'queued', generation_id" in piece
        if self._has_queued and b"COMMIT" in piece and not self._cuts:
            self._cuts.append(piece)
            return True
        return False
