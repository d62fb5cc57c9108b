"""(d) A stranger who can read and write Redis, and nothing else, against the API and workers on a real Valkey."""

import gzip
import json
import re
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import numpy as np
import pytest
from redis import Redis
from sqlalchemy import Engine

from tests.api_server import api_client, assert_problem, client_of_docs, encode_waiting, many, submit
from tests.database import ask, execute
from tests.integration.crashes.victims import Servers, running, work
from tests.protocol import SPEC, dispatch_all, make_items, vector_of
from tests.protocol import submit as submit_items
from tests.queries import SIGNER, SPACE, listening, opening_consumer, take_one
from tests.waiting import repeating, wait_for
from vectormill.broker.app import ENCODE_CHUNK, queue_of
from vectormill.broker.queries import (
    EncodedTexts,
    NotEncoded,
    Query,
    QueryAccepted,
    Signer,
    queue_key,
    write_answer,
    write_query,
    write_spec,
)
from vectormill.collections.collections import find_generation
from worker.engine.request import EncodeRequest

SEARCH = "/v1/collections/docs/search"
STRANGER = Signer(b"a key that the stranger made up.")
WRONG = np.ones((1, SPEC.dimensions), dtype="<f4").tobytes()


@pytest.fixture
def client(engine: Engine, redis: Redis, redis_url: str) -> Iterator[httpx.Client]:
    with client_of_docs(engine, redis_url=redis_url) as client:
        yield client


def lie(query: Query) -> EncodedTexts:
    return EncodedTexts(query.id, SPEC.dimensions, WRONG, {}, b"\1\0\0\0", [])


def unsigned(query: Query) -> Query:
    return Query(*(getattr(query, name) for name in query.__struct_fields__ if name != "signature"))


def forge(query: Query, other: tuple[Query, bytes]) -> list[bytes]:
    """Return forged answers to a query, made by a stranger who has read it and the true answer to another query."""
    earlier, true = other
    return [
        write_answer(unsigned(query), lie(query), STRANGER),
        write_answer(unsigned(query), NotEncoded(query.id, "no"), STRANGER),
        write_answer(unsigned(query), QueryAccepted(query.id, "nobody"), STRANGER),
        write_answer(query, lie(query), STRANGER),
        write_answer(query, QueryAccepted(query.id, "nobody"), STRANGER),
        true,
        true.replace(earlier.id, query.id),
        true.replace(earlier.id, query.id, 1),
        write_answer(query, lie(query), SIGNER)[:-4],
        write_answer(query, lie(query), SIGNER)[:30],
        b"",
        b"\2",
        b"\2" + query.id,
        bytes(1 << 20),
    ]


def told(client: httpx.Client, reason: str) -> float:
    name = f'vectormill_query_answers_refused_total{{reason="{reason}"}}'
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].split()[-1]) if lines else 0.0


def test_only_the_worker_s_own_answer_to_the_very_query_is_taken(
    client: httpx.Client, redis_url: str, redis: Redis
) -> None:
    with opening_consumer(redis_url) as (consumer, worker), ThreadPoolExecutor(1) as clients:
        with repeating(lambda: consumer.beat(set()), 0.05):
            wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="a worker listens")
            first = clients.submit(client.post, SEARCH, json={"text": "text 3"})
            earlier = take_one(consumer)
        in_hand = {earlier.id}
        with repeating(lambda: consumer.beat(in_hand), 0.05):
            consumer.answer(earlier, QueryAccepted(earlier.id, worker))
            vector = np.asarray(vector_of(b"text 3"), dtype="<f4").tobytes()
            answer = EncodedTexts(earlier.id, SPEC.dimensions, vector, {}, b"\1\0\0\0", [])
            true = write_answer(earlier, answer, SIGNER)
            consumer.answer(earlier, answer)
            assert first.result().json()["data"][0]["key"] == "k3"

            second = clients.submit(client.post, SEARCH, json={"text": "text 4"})
            query = take_one(consumer)
            in_hand.add(query.id)
            consumer.answer(query, QueryAccepted(query.id, worker))
            for forged in forge(query, (earlier, true)):
                redis.rpush(query.answers, forged)
            wait_for(lambda: redis.llen(query.answers) == 0, because="the API has read them")
            assert not second.done()
            vector = np.asarray(vector_of(b"text 4"), dtype="<f4").tobytes()
            consumer.answer(query, EncodedTexts(query.id, SPEC.dimensions, vector, {}, b"\1\0\0\0", []))
            for forged in forge(query, (earlier, true)):
                redis.rpush(query.answers, forged)
            assert second.result().json()["data"][0]["key"] == "k4"
    assert (told(client, "unsigned"), told(client, "forged"), told(client, "unreadable")) > (2, 5, 1)


def test_a_flood_and_an_answer_without_measure_are_passed_over(
    client: httpx.Client, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.broker.queries.MAX_REPLY_BYTES", 1 << 20)
    with opening_consumer(redis_url) as (consumer, worker), ThreadPoolExecutor(1) as clients:
        in_hand: set[bytes] = set()
        with repeating(lambda: consumer.beat(in_hand), 0.05):
            wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="a worker listens")
            answer = clients.submit(client.post, SEARCH, json={"text": "text 4"})
            query = take_one(consumer)
            in_hand.add(query.id)
            consumer.answer(query, QueryAccepted(query.id, worker))
            redis.rpush(query.answers, bytes(2 << 20))
            redis.rpush(query.answers, *[write_answer(query, lie(query), STRANGER)] * 5000)
            vector = vector_of(b"text 4").astype("<f4").tobytes()
            consumer.answer(query, EncodedTexts(query.id, SPEC.dimensions, vector, {}, b"\1\0\0\0", []))
            assert answer.result().json()["data"][0]["key"] == "k4"
    assert (told(client, "oversized"), told(client, "forged")) == (1, 5000)


def test_a_worker_serves_the_queries_of_its_apis_alone_and_each_once(
    client: httpx.Client, redis_url: str, redis: Redis, engine: Engine
) -> None:
    seen: list[bytes] = []

    def ask_for(text: bytes, answers: str = "answers") -> Query:
        later = int((time.time() + 60) * 1000)
        spec = write_spec(ask(engine, find_generation, "docs").spec)
        return Query(uuid4().bytes[:8], answers, later, 1000, spec, [text])

    def note(request: EncodeRequest) -> None:
        seen.extend(request.texts)

    true = ask_for(b"true").sign(SIGNER)
    with listening(redis_url, note):
        wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="a worker listens")
        for forged in (
            ask_for(b"unsigned"),
            ask_for(b"another's").sign(STRANGER),
            Query(*(*true_fields(true)[:5], [b"another text"], [], true.signature)),
            Query(true.id, "another list", *true_fields(true)[2:]),
            true,
            true,
            true,
        ):
            redis.rpush(queue_key(SPACE), write_query(forged))
        assert client.post(SEARCH, json={"text": "text 4"}).status_code == 200
        wait_for(lambda: redis.llen("answers") == 2, because="it was taken and encoded")
    assert sorted(seen) == [b"text 4", b"true"]
    assert redis.llen("answers") == 2
    assert not redis.exists("another list")


def true_fields(query: Query) -> list[Any]:
    return [getattr(query, name) for name in query.__struct_fields__]


def test_a_worker_of_the_release_before_is_believed_for_a_day_and_then_named(
    engine: Engine, redis: Redis, redis_url: str
) -> None:
    for days, is_believed in ((1, True), (0, False)):
        execute(
            engine,
            "UPDATE vectormill.secrets SET required_from = now() + make_interval(days => :days)",
            days=days,
        )
        with (
            api_client(engine, redis_url=redis_url) as client,
            opening_consumer(redis_url) as (consumer, worker),
            ThreadPoolExecutor(1) as clients,
        ):
            if days:
                submit(client, many(20), collection="docs")
                encode_waiting(engine)
            in_hand: set[bytes] = set()
            with repeating(lambda in_hand=in_hand, consumer=consumer: consumer.beat(in_hand), 0.05):  # type: ignore[misc]
                wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="a worker listens")
                answer = clients.submit(client.post, SEARCH, json={"text": "text 4"})
                for _ in range(1 if is_believed else 2):
                    query = unsigned(take_one(consumer))
                    in_hand.add(query.id)
                    consumer.answer(query, QueryAccepted(query.id, worker))
                    vector = vector_of(b"text 4").astype("<f4").tobytes()
                    told_of = EncodedTexts(query.id, SPEC.dimensions, vector, {}, b"\1\0\0\0", [])
                    consumer.answer(query, told_of)
                if is_believed:
                    assert answer.result().json()["data"][0]["key"] == "k4"
                else:
                    assert_problem(
                        answer.result(), 503, "query-lost", "restart workers of an earlier release"
                    )


# -- messages of Celery -----------------------------------------------------------------------------------------------

QUEUE: Final = queue_of(SPEC.model)


def write_celery(
    task: str = ENCODE_CHUNK, args: Any = (), kwargs: Any = None, embed: Any = None, **changes: Any
) -> bytes:
    """A message of Celery's second protocol as kombu writes it to Redis, with changes."""
    body = json.dumps([args, kwargs or {}, embed or {}]).encode()
    headers = {"lang": "py", "task": task, "id": uuid4().hex, "root_id": uuid4().hex} | changes.pop(
        "headers", {}
    )
    message = {
        "body": b64encode(changes.pop("body", body)).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "correlation_id": headers["id"],
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": uuid4().hex,
        },
    }
    return json.dumps(message | changes).encode()


def test_messages_to_a_worker_can_have_a_chunk_encoded_and_nothing_else(
    engine: Engine, database_url: str, redis_url: str, redis: Redis
) -> None:
    job = submit_items(engine, make_items(4), chunk_max_items=1)
    chunks = sorted(each.chunk_id for each in dispatch_all(engine))
    assert len(chunks) == 4
    own = {"chunk_id": chunks[0], "dispatch_seq": 1}
    call = {"task": "stranger.task", "args": [], "kwargs": {}, "options": {"queue": "stranger"}}
    bomb = gzip.compress(bytes(200 << 20))
    forged = [
        write_celery("celery.group", [[call], None, None, [], False]),
        write_celery("celery.map", [call, [1, 2]]),
        write_celery("celery.chunks", [call, [1, 2], 1]),
        write_celery("celery.chord_unlock", ["x", call]),
        write_celery("os.system", ["true"]),
        write_celery(kwargs=own, embed={"callbacks": [call]}),
        write_celery(kwargs=own, embed={"errbacks": [call]}),
        write_celery(kwargs=own, embed={"chain": [call]}),
        write_celery(kwargs=own, headers={"eta": "2099-01-01T00:00:00+00:00"}),
        write_celery(args=[chunks[0], 1]),
        write_celery(kwargs={"chunk_id": f"{chunks[0]}; DROP TABLE vectormill.jobs", "dispatch_seq": 1}),
        write_celery(kwargs={"chunk_id": True, "dispatch_seq": 1}),
        write_celery(kwargs={"chunk_id": [chunks[0]], "dispatch_seq": 1}),
        write_celery(kwargs=own | {"worker": "x"}),
        write_celery(body=b"{}"),
        write_celery(body=b"[1]"),
        write_celery(body=b"no json"),
        write_celery(body=bomb, headers={"compression": "application/x-gzip"}),
        write_celery(body=b"\x80\x04N.", **{"content-type": "application/x-python-serialize"}),
        write_celery(
            body=json.dumps({"task": ENCODE_CHUNK, "id": "1", "kwargs": own}).encode(), headers={"task": None}
        ),
    ]
    # After a failed attempt a chunk waits, so that five attempts are no matter of seconds.
    wait = "UPDATE vectormill.chunks SET state = 'pending', available_at = now() + interval '1 hour' WHERE id = :id"
    execute(engine, wait, id=chunks[1])
    others = (-1, 0, 1 << 62, chunks[1])
    unknown = [write_celery(kwargs={"chunk_id": number, "dispatch_seq": 1}) for number in others]
    with running(work, Servers(database_url, redis_url), is_watched=False) as child:
        for message in (*forged, *unknown):
            redis.lpush(QUEUE, message)
        wait_for(lambda: redis.llen(QUEUE) == 0, because="the worker has read all")
        redis.lpush(QUEUE, write_celery(kwargs=own | {"chunk_id": chunks[-1]}))
        states = "SELECT state FROM vectormill.chunks WHERE job_id = :job ORDER BY id"
        wait_for(
            lambda: execute(engine, states, job=job.id).scalars().all()[-1] == "done",
            because="the chunk is encoded",
        )
        assert execute(engine, states, job=job.id).scalars().all() == ["queued", "pending", "queued", "done"]
        assert child.process.is_alive()
        (peak,) = re.findall(r"VmHWM:\s*(\d+)", Path(f"/proc/{child.process.pid}/status").read_text())
    assert not redis.exists("stranger")
    assert int(peak) < 1 << 20, "kilobytes"
