"""Traces as a collector gets them by OTLP: of a job from its request to the commit of its chunks, of a query on its way
through Redis, of a round of dispatches, and of a run and its phases.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from redis import Redis
from sqlalchemy import Engine, text

from scheduler.dispatcher import Dispatcher
from tests.api_server import api_client, encode_waiting, encoding_meanwhile, many, submit
from tests.chunk_work import encode_as
from tests.database import execute
from tests.indexers import ListedSource, await_run, indexing, make_collection, row, start_run
from tests.obedient_engine import ObedientEngine
from tests.protocol import make_items, register_worker
from tests.protocol import submit as submit_items
from tests.queries import SPACE, listening
from tests.trace_collector import Collector, Span, collecting
from tests.waiting import wait_for
from vectormill import tracing
from vectormill.broker.app import make_app
from vectormill.broker.queries import queue_key
from vectormill.broker.queues import QueueReader, RedisLossDetector
from vectormill.processes.logs import _known
from vectormill.tracing import begin_tracing, current_traceparent, is_tracing, span
from worker.engine.request import EncodeRequest, EncodeResult
from worker.identity import WorkerIdentity

TRACES = [f"4bf92f3577b34da6a3ce929d0e0e473{number}" for number in range(3)]
TRACE, PARENT = TRACES[0], "00f067aa0ba902b7"
SEARCH = "/v1/collections/docs/search"
FIND_MODEL = text("SELECT model FROM vectormill.jobs LIMIT 1")


def end_tracing() -> None:
    """Send the pending spans and stop recording, as a process does when it exits."""
    if tracing._provider is not None:
        tracing._provider.shutdown()
    tracing._tracer = tracing._provider = None


class PromptEngine(ObedientEngine):
    """Keeps what log lines of its thread would say of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[dict[str, Any]] = []

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        self.known.append(dict(_known.get()))
        return replace(super().encode(request, cancelled), stage_seconds={"tokenize": 0.25, "run": 0.5})


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
def prompt() -> PromptEngine:
    return PromptEngine()


def encode_all(engine: Engine, prompt: PromptEngine) -> list[Mapping[str, Any]]:
    model = execute(engine, FIND_MODEL).scalar_one()
    return encode_as(WorkerIdentity("fake-cpu0@test", uuid4(), uuid4(), model, slots=4), engine, prompt)


def submit_within(http: httpx.Client, flags: str = "01", count: int = 3) -> None:
    http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-{flags}"
    submit(http, many(count))


def test_a_trace_leads_from_the_clients_request_to_the_commit(
    engine: Engine, traced: Collector, prompt: PromptEngine
) -> None:
    with api_client(engine, chunk_max_items=2) as http:
        submit_within(http)
        http.get("/livez")
    results = encode_all(engine, prompt)
    end_tracing()
    assert [result["outcome"] for result in results] == ["done", "done"]
    assert {span.trace_id for span in traced.spans} == {TRACE}
    assert traced.services == {"vectormill-test"}
    (request,) = [span for span in traced.spans if span.name == "POST /v1/jobs"]
    assert (request.parent_id, request.attributes["vectormill.status"]) == (PARENT, 202)
    first, second = [span for span in traced.spans if span.name == "chunk"]
    assert first.parent_id == second.parent_id == request.span_id
    told = first.attributes
    assert (told["vectormill.items"], told["vectormill.fence"], told["vectormill.attempt"]) == (2, 1, 1)
    assert (told["vectormill.outcome"], told["vectormill.rows"], told["vectormill.tokens"]) == ("done", 2, 6)
    within = {span.name: span for span in traced.spans if span.parent_id == first.span_id}
    assert set(within) == {"wait in redis", "claim", "load", "encode", "commit"}
    assert within["encode"].attributes["vectormill.tokenize_seconds"] == 0.25
    assert all(0 <= span.seconds <= first.seconds for span in within.values())
    known = prompt.known[0]
    assert known["trace_id"] == TRACE
    assert (known["chunk_id"], known["model"]) == (told["vectormill.chunk_id"], told["vectormill.model"])


def test_a_trace_that_its_client_does_not_record_is_not_recorded_here(
    engine: Engine, traced: Collector, prompt: PromptEngine
) -> None:
    with api_client(engine) as http:
        submit_within(http, flags="00")
    encode_all(engine, prompt)
    end_tracing()
    assert traced.spans == []


def test_what_is_no_traceparent_begins_a_trace_of_its_own(engine: Engine, traced: Collector) -> None:
    with api_client(engine) as http:
        for traceparent in ("", "nonsense", "00-0-0-01", "ä"):
            http.headers = httpx.Headers([(b"traceparent", traceparent.encode())])
            submit(http, many(1))
    end_tracing()
    assert [span.parent_id for span in traced.spans] == [""] * 4
    assert TRACE not in {span.trace_id for span in traced.spans}


def test_of_traces_that_begin_here_the_wished_share_is_recorded(collector: Collector) -> None:
    begin_tracing("test", collector.url, 0.0)
    with span("nothing"):
        flags = (current_traceparent() or "").rpartition("-")[2]
        assert int(flags, 16) & 1 == 0  # not sampled
    end_tracing()
    assert collector.spans == []


def test_a_collector_that_refuses_or_is_away_costs_the_work_nothing(
    engine: Engine, collector: Collector, prompt: PromptEngine
) -> None:
    collector.status = 400
    for url in (collector.url, "http://127.0.0.1:9"):
        begin_tracing("test", url, 1.0)
        try:
            with api_client(engine) as http:
                submit_within(http)
            assert [result["outcome"] for result in encode_all(engine, prompt)] == ["done"]
            began = time.monotonic()
        finally:
            end_tracing()
        assert time.monotonic() - began < 60
    assert collector.num_requests > 0


def test_without_a_collector_nothing_is_recorded(engine: Engine, prompt: PromptEngine) -> None:
    begin_tracing("test", None, 1.0)
    assert not is_tracing()
    assert current_traceparent() is None
    with api_client(engine) as http:
        submit_within(http)
    encode_all(engine, prompt)
    assert execute(engine, "SELECT traceparent FROM vectormill.jobs").scalar_one() is None
    assert "trace_id" not in prompt.known[0]


def named(collector: Collector, name: str) -> list[Span]:
    return [span for span in collector.spans if span.name == name]


def ask(client: httpx.Client, number: int, flags: str = "01") -> httpx.Response:
    headers = {"traceparent": f"00-{TRACES[number]}-{PARENT}-{flags}"}
    return client.post(SEARCH, json={"text": f"text {number}"}, headers=headers)


def test_a_query_is_traced_through_redis_to_the_worker_and_the_others_in_its_message_are_linked(
    engine: Engine, redis_url: str, redis: Redis, traced: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.queries.FIRST_LOOK_SECONDS", 60.0)
    # While the first message is held, what comes behind it goes together.
    monkeypatch.setattr("api.queries.MESSAGES_PER_WORKER", 1)
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
    with closing(RedisLossDetector(redis_url)) as sentinel, closing(QueueReader(redis_url)) as queues:
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
    traceparent = execute(engine, "SELECT traceparent FROM vectormill.jobs").scalar_one()
    assert traceparent.startswith(f"00-{run.trace_id}-{phases['encoding'].span_id}-")
