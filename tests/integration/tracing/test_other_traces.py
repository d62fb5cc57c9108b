"""What is no chunk has spans too: a query on its way through Redis, a round of dispatches, a run and its phases."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest
from redis import Redis
from sqlalchemy import Engine, text

from scheduler.dispatcher import Dispatcher
from tests.api_server import api_client, encode_waiting, encoding_meanwhile, many, submit
from tests.indexers import ListedSource, await_run, indexing, make_collection, row, start_run
from tests.protocol import make_items, register_worker
from tests.protocol import submit as submit_items
from tests.queries import SPACE, listening
from tests.trace_collector import Collector, Span, collecting
from tests.waiting import wait_for
from vectormill.broker.app import make_app
from vectormill.broker.queries import queue_key
from vectormill.broker.queues import QueueReader, Sentinel
from vectormill.tracing import begin_tracing, end_tracing
from worker.engine.request import EncodeRequest

TRACES = [f"4bf92f3577b34da6a3ce929d0e0e473{number}" for number in range(3)]
PARENT = "00f067aa0ba902b7"
SEARCH = "/v1/collections/docs/search"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def traced(collector: Collector) -> Iterator[Collector]:
    """Where the spans are once the test has called end_tracing()."""
    begin_tracing("test", collector.url, 1.0)
    try:
        yield collector
    finally:
        end_tracing()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as redis:
        redis.flushall()
        yield redis


def named(collector: Collector, name: str) -> list[Span]:
    return [span for span in collector.spans if span.name == name]


def ask(client: httpx.Client, number: int, flags: str = "01") -> httpx.Response:
    headers = {"traceparent": f"00-{TRACES[number]}-{PARENT}-{flags}"}
    return client.post(SEARCH, json={"text": f"text {number}"}, headers=headers)


def test_a_query_is_traced_through_redis_to_the_worker_and_the_others_in_its_message_are_linked(
    engine: Engine, redis_url: str, redis: Redis, traced: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.queries.exchange.FIRST_LOOK_SECONDS", 60.0)
    # While the first message is held, what comes behind it goes together.
    monkeypatch.setattr("api.queries.exchange.MESSAGES_PER_WORKER", 1)
    begun, go_on = threading.Event(), threading.Event()

    def hold(request: EncodeRequest) -> None:
        begun.set()
        assert go_on.wait(60)

    with api_client(engine, redis_url=redis_url) as client, ThreadPoolExecutor(3) as clients:
        submit(client, many(3), collection="docs")
        encode_waiting(engine)
        with listening(redis_url, hold):
            wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="a worker listens")
            answers = [clients.submit(ask, client, 0)]
            assert begun.wait(60)
            for number in (1, 2):
                answers.append(clients.submit(ask, client, number))
                asked = f"vectormill_query_texts_total {1.0 + number}"
                wait_for(lambda asked=asked: asked in client.get("/metrics").text, because="it is asked")  # type: ignore[misc]
            go_on.set()
            assert [answer.result(60).status_code for answer in answers] == [200] * 3
    end_tracing()
    queries = {span.trace_id: span for span in named(traced, "query") if span.trace_id in TRACES}
    assert set(queries) == set(TRACES)
    first, behind = sorted(
        named(traced, "encode query"), key=lambda span: span.attributes["vectormill.texts"]
    )
    assert (first.trace_id, first.parent_id, first.links) == (TRACES[0], queries[TRACES[0]].span_id, [])
    assert (behind.trace_id, behind.parent_id) == (TRACES[1], queries[TRACES[1]].span_id)
    assert behind.links == [queries[TRACES[2]].span_id]
    requests = {span.trace_id: span.span_id for span in traced.spans if span.name.endswith("/search")}
    assert {trace: query.parent_id for trace, query in queries.items()} == requests


def test_a_query_whose_client_records_nothing_is_not_traced_by_the_worker(
    engine: Engine, redis_url: str, redis: Redis, traced: Collector
) -> None:
    with api_client(engine, redis_url=redis_url) as client:
        submit(client, many(3), collection="docs")
        encode_waiting(engine)
        with listening(redis_url):
            wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="a worker listens")
            assert ask(client, 0, flags="00").status_code == 200
    end_tracing()
    assert named(traced, "query") == named(traced, "encode query") == []


def test_a_round_of_dispatches_is_traced_and_one_without_any_is_not(
    engine: Engine, redis_url: str, redis: Redis, traced: Collector
) -> None:
    register_worker(engine)
    with closing(Sentinel(redis_url)) as sentinel, closing(QueueReader(redis_url)) as queues:
        dispatcher = Dispatcher(engine, make_app(redis_url), sentinel, queues, ageing_seconds=600)
        assert dispatcher.dispatch() == 0
        submit_items(engine, make_items(2))
        dispatched = dispatcher.dispatch()
    end_tracing()
    (round_,) = named(traced, "dispatch")
    assert round_.attributes["vectormill.chunks"] == dispatched > 0


def test_a_run_is_a_trace_of_its_phases_and_the_chunks_of_its_job_are_in_it(
    engine: Engine, traced: Collector
) -> None:
    make_collection(engine)
    source = ListedSource([row(f"k{number}", f"text {number}") for number in range(4)])
    with indexing(engine, source), encoding_meanwhile(engine):
        run_id = start_run(engine)
        assert await_run(engine, run_id).state == "completed"
    end_tracing()
    (run,) = named(traced, "run")
    assert (run.attributes["vectormill.run_id"], run.attributes["vectormill.collection"]) == (
        str(run_id),
        "docs",
    )
    phases = {span.name: span for span in traced.spans if span.parent_id == run.span_id}
    assert {"reading", "comparing", "encoding"} <= set(phases)
    with engine.connect() as connection:
        traceparent = connection.execute(text("SELECT traceparent FROM vectormill.jobs")).scalar_one()
    assert traceparent.startswith(f"00-{run.trace_id}-{phases['encoding'].span_id}-")
