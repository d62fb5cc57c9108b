"""A query goes to a worker in a message and no row is written: what is answered, by whom, and what a loss costs."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import httpx
import pytest
from redis import Redis
from sqlalchemy import Engine

from tests.api_server import (
    api_client,
    assert_problem,
    client_of_docs,
    count_jobs,
    encode_waiting,
    many,
    submit,
)
from tests.database import ask
from tests.protocol import LONG
from tests.queries import SIGNER, SPACE, listening, opening_consumer, take_one
from tests.residue import find_residue
from tests.waiting import repeating, wait_for
from vectormill.broker.queries import (
    Query,
    QueryAccepted,
    QueryConsumer,
    queue_key,
    write_query,
    write_spec,
)
from vectormill.collections.collections import find_generation
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.processes.lifetimes import free_port
from worker.engine.request import EncodeRequest, RunnerDied

SEARCH = "/v1/collections/docs/search"
SECRET = "what nobody but the worker shall read"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late a pulse comes on a busy machine, no query is taken for lost."""
    monkeypatch.setattr("api.queries.FIRST_LOOK_SECONDS", 60.0)


@pytest.fixture
def client(engine: Engine, redis: Redis, redis_url: str) -> Iterator[httpx.Client]:
    with client_of_docs(engine, redis_url=redis_url) as client:
        yield client


def wait_for_listener(redis: Redis) -> None:
    wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="a worker listens")


@pytest.mark.usefixtures("patient")
def test_a_query_is_answered_by_a_worker_and_its_text_is_nowhere(
    client: httpx.Client, engine: Engine, redis_url: str, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), listening(redis_url):
        wait_for_listener(redis)
        found = client.post(SEARCH, json={"text": "text 4"})
        assert found.json()["data"][0]["key"] == "k4"
        assert client.post(SEARCH, json={"text": SECRET}).status_code == 200
        together = client.post(SEARCH, json={"queries": [{"text": f"text {n}"} for n in (3, 5, 3)]})
        texts = ["text 3", LONG.decode(), "text 5"]
        mixed = client.post(SEARCH, json={"queries": [{"text": text} for text in texts]}).json()["data"]
        assert [each.get("truncated") for each in mixed] == [None, True, None]
    assert [each["data"][0]["key"] for each in together.json()["data"]] == ["k3", "k5", "k3"]
    assert count_jobs(engine) == 1
    assert find_residue(engine, SECRET) == []
    assert SECRET not in caplog.text
    assert not [key for key in redis.scan_iter() if redis.type(key) == b"list" and redis.llen(key)]
    scraped = client.get("/metrics").text
    assert "vectormill_query_texts_total 7.0" in scraped
    assert "vectormill_query_repeats_total 0.0" in scraped


@pytest.mark.usefixtures("patient")
def test_what_comes_while_the_worker_is_busy_goes_to_it_in_one_message(
    client: httpx.Client, redis_url: str, redis: Redis
) -> None:
    sizes: list[int] = []
    go_on = threading.Event()

    def note(request: EncodeRequest) -> None:
        sizes.append(len(request.texts))
        assert go_on.wait(60)

    with listening(redis_url, note), ThreadPoolExecutor(12) as clients:
        wait_for_listener(redis)
        answers = []
        for number in range(12):
            answers.append(clients.submit(client.post, SEARCH, json={"text": f"text {number}"}))
            if number < 2:
                wait_for(lambda number=number: len(sizes) == number + 1, because="messages are at work")  # type: ignore[misc]
        wait_for(lambda: "12.0" in told(client, "vectormill_query_texts_total"), because="all are asked")
        go_on.set()
        assert [found.result().json()["data"][0]["key"] for found in answers] == [f"k{n}" for n in range(12)]
    assert sizes == [1, 1, 10]


def told(client: httpx.Client, metric: str) -> str:
    return next(line for line in client.get("/metrics").text.splitlines() if line.startswith(metric))


def test_another_worker_answers_for_one_that_died(client: httpx.Client, redis_url: str, redis: Redis) -> None:
    with opening_consumer(redis_url) as (consumer, worker), ThreadPoolExecutor(1) as clients:
        consumer.beat(set())
        answer = clients.submit(client.post, SEARCH, json={"text": "text 4"})
        query = take_one(consumer)
        consumer.answer(query, QueryAccepted(query.id, worker))
        consumer.beat({query.id})  # the last sign of its life
        with listening(redis_url):
            assert answer.result().json()["data"][0]["key"] == "k4"
    assert told(client, "vectormill_query_repeats_total").endswith(" 1.0")


def test_a_query_whose_worker_died_is_refused_long_before_its_time_when_there_is_no_other(
    client: httpx.Client, redis_url: str, redis: Redis
) -> None:
    with opening_consumer(redis_url) as (consumer, worker), ThreadPoolExecutor(1) as clients:
        consumer.beat(set())
        answer = clients.submit(client.post, SEARCH, json={"text": "text 4"})
        query = take_one(consumer)
        consumer.answer(query, QueryAccepted(query.id, worker))
        consumer.beat({query.id})
        problem = answer.result()
        assert_problem(problem, 503, "query-lost", "again")
        assert problem.headers["retry-after"]


def test_a_query_that_two_workers_lost_is_refused(client: httpx.Client, redis_url: str, redis: Redis) -> None:
    with opening_consumer(redis_url) as (consumer, worker), ThreadPoolExecutor(1) as clients:
        consumer.beat(set())
        answer = clients.submit(client.post, SEARCH, json={"text": "text 4"})
        for _ in range(2):
            query = take_one(consumer)
            consumer.answer(query, QueryAccepted(query.id, worker))
            with beating(consumer):  # it lives and does not have it, as one that was started again
                wait_for(lambda: answer.done() or redis.llen(queue_key(SPACE)), because="it is missed")
        assert_problem(answer.result(), 503, "query-lost", "in two attempts")


def beating(consumer: QueryConsumer) -> AbstractContextManager[None]:
    """A worker that lives and has nothing in hand."""
    return repeating(lambda: consumer.beat(set()), 0.05)


def test_a_query_that_redis_lost_is_sent_again(client: httpx.Client, redis_url: str, redis: Redis) -> None:
    with opening_consumer(redis_url) as (consumer, _), ThreadPoolExecutor(1) as clients, beating(consumer):
        wait_for_listener(redis)
        answer = clients.submit(client.post, SEARCH, json={"text": "text 4"})
        wait_for(lambda: redis.llen(queue_key(SPACE)), because="the query waits")
        redis.flushall()
        with listening(redis_url):
            assert answer.result().json()["data"][0]["key"] == "k4"


def test_a_query_for_which_nobody_waits_is_passed_over(
    client: httpx.Client, redis_url: str, redis: Redis, engine: Engine
) -> None:
    seen: list[list[bytes]] = []
    spec = write_spec(ask(engine, find_generation, "docs").spec)
    late = Query(b"12345678", "vectormill:queries:answers:none", 1, 1000, spec, [b"too late"]).sign(SIGNER)
    redis.rpush(queue_key(SPACE), b"no message", write_query(late))
    with listening(redis_url, lambda request: seen.append(list(request.texts))):
        wait_for_listener(redis)
        assert client.post(SEARCH, json={"text": "text 4"}).status_code == 200
    assert seen == [[b"text 4"]]


def test_a_text_that_ends_the_model_s_process_takes_no_other_query_with_it(
    client: httpx.Client, redis_url: str, redis: Redis
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def encode(request: EncodeRequest) -> None:
        if b"poison" in request.texts:
            raise RunnerDied("The model process died")
        if not go_on.is_set():
            held.set()
            assert go_on.wait(60)

    with listening(redis_url, encode), ThreadPoolExecutor(8) as clients:
        wait_for_listener(redis)
        first = [clients.submit(client.post, SEARCH, json={"text": f"text {n}"}) for n in range(2)]
        assert held.wait(60)
        texts = ["text 4", "poison", "text 5"]
        answers = [clients.submit(client.post, SEARCH, json={"text": text}) for text in texts]
        wait_for(lambda: "5.0" in told(client, "vectormill_query_texts_total"), because="all are asked")
        go_on.set()
        found = [answer.result() for answer in answers]
        assert all(answer.result().status_code == 200 for answer in first)
    assert_problem(found[1], 503, "query-lost", "The model process died")
    assert [found[n].json()["data"][0]["key"] for n in (0, 2)] == ["k4", "k5"]


def test_an_api_without_redis_says_what_a_query_needs(engine: Engine) -> None:
    with api_client(engine) as client:
        submit(client, many(3), collection="docs")
        encode_waiting(engine)
        assert_problem(client.post(SEARCH, json={"text": SECRET}), 503, "unavailable", "VECTORMILL_REDIS_URL")
    assert find_residue(engine, SECRET) == []


def test_without_a_worker_a_query_waits_for_one_and_is_never_written_down(
    engine: Engine, redis_url: str, redis: Redis
) -> None:
    with client_of_docs(engine, redis_url=redis_url, search_timeout_seconds=0.4) as client:
        problem = client.post(SEARCH, json={"text": SECRET})
        assert_problem(problem, 503, "encoding-timeout", "0.4 s", f"No live worker serves {DEFAULT_MODEL}")
    assert find_residue(engine, SECRET) == []


def test_a_redis_that_is_away_is_waited_for_as_long_as_a_search_may_take(
    engine: Engine, redis: Redis
) -> None:
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    with client_of_docs(engine, redis_url=nobody, search_timeout_seconds=0.4) as client:
        assert_problem(client.post(SEARCH, json={"text": SECRET}), 503, "encoding-timeout", "0.4 s")
    assert find_residue(engine, SECRET) == []
