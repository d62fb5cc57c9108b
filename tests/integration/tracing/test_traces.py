"""One trace from the request that submits a job to the commit of its chunks, as a collector gets it by OTLP."""

import threading
import time
from collections.abc import Iterator
from typing import Any, cast
from uuid import uuid4

import httpx
import numpy as np
import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, many, submit
from tests.protocol import SPEC, dispatch_all, vector_of
from tests.trace_collector import Collector, collecting
from vectormill.processes.logs import _known
from vectormill.ragged import Ragged
from vectormill.settings import Settings
from vectormill.tracing import begin_tracing, current_traceparent, end_tracing, is_tracing, span
from worker.chunk.chunk_encoder import ChunkEncoder
from worker.chunk.commit import PostgresSink
from worker.chunk.leases import LeaseKeeper
from worker.chunk.ledger import Timesheet
from worker.engine.request import EncodeRequest, EncodeResult
from worker.identity import WorkerIdentity

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
FIND_MODEL = text("SELECT model FROM vectormill.jobs LIMIT 1")


class PromptEngine:
    """Has the vectors at once, and keeps what log lines of its thread would say of the work."""

    run_seconds = 0.0

    def __init__(self) -> None:
        self.known: list[dict[str, Any]] = []

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        self.known.append(dict(_known.get()))
        n = len(request.texts)
        vectors = np.array([vector_of(given) for given in request.texts]).reshape(n, SPEC.dimensions)
        return EncodeResult(
            Ragged.from_matrix(vectors),
            {},
            np.full(n, 3, dtype=np.int32),
            4 * n,
            np.zeros(n, dtype=np.bool_),
            {"tokenize": 0.25, "run": 0.5},
            num_reused=0,
            num_passages=0,
        )


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def prompt() -> PromptEngine:
    return PromptEngine()


def encode_all(engine: Engine, prompt: PromptEngine) -> list[dict[str, Any]]:
    """As a worker does, chunk by chunk; what Flower would show of each."""
    with engine.connect() as connection:
        model = connection.execute(FIND_MODEL).scalar_one()
    identity = WorkerIdentity("fake-cpu0@test", uuid4(), uuid4(), model, slots=4)
    keeper = LeaseKeeper(engine, identity, dict, heartbeat_seconds=1, lease_seconds=30)
    keeper.start()
    try:
        encoder = ChunkEncoder(
            engine,
            cast(Any, prompt),
            keeper,
            PostgresSink(engine, threading.Event()),
            Timesheet(lambda: 0.0),
            identity,
            Settings(),
        )
        return [encoder.encode_chunk(dispatch.chunk_id) for dispatch in dispatch_all(engine)]
    finally:
        keeper.stop()


def submit_within(http: httpx.Client, flags: str = "01", count: int = 3) -> None:
    http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-{flags}"
    submit(http, many(count))


def test_a_trace_leads_from_the_clients_request_to_the_commit(
    engine: Engine, collector: Collector, prompt: PromptEngine
) -> None:
    begin_tracing("test", collector.url, 1.0)
    try:
        with api_client(engine, chunk_max_items=2) as http:
            submit_within(http)
            http.get("/livez")
        results = encode_all(engine, prompt)
    finally:
        end_tracing()
    assert [result["outcome"] for result in results] == ["done", "done"]
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert collector.services == {"vectormill-test"}
    (request,) = [span for span in collector.spans if span.name == "POST /v1/jobs"]
    assert (request.parent_id, request.attributes["vectormill.status"]) == (PARENT, 202)
    first, second = [span for span in collector.spans if span.name == "chunk"]
    assert first.parent_id == second.parent_id == request.span_id
    told = first.attributes
    assert (told["vectormill.items"], told["vectormill.fence"], told["vectormill.attempt"]) == (2, 1, 1)
    assert (told["vectormill.outcome"], told["vectormill.rows"], told["vectormill.tokens"]) == ("done", 2, 6)
    within = {span.name: span for span in collector.spans if span.parent_id == first.span_id}
    assert set(within) == {"wait in redis", "claim", "load", "encode", "commit"}
    assert within["encode"].attributes["vectormill.tokenize_seconds"] == 0.25
    assert all(0 <= span.seconds <= first.seconds for span in within.values())
    known = prompt.known[0]
    assert known["trace_id"] == TRACE
    assert (known["chunk_id"], known["model"]) == (told["vectormill.chunk_id"], told["vectormill.model"])


def test_a_trace_that_its_client_does_not_record_is_not_recorded_here(
    engine: Engine, collector: Collector, prompt: PromptEngine
) -> None:
    begin_tracing("test", collector.url, 1.0)
    try:
        with api_client(engine) as http:
            submit_within(http, flags="00")
        encode_all(engine, prompt)
    finally:
        end_tracing()
    assert collector.spans == []


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01", "ä"])
def test_what_is_no_traceparent_begins_a_trace_of_its_own(
    engine: Engine, collector: Collector, traceparent: str
) -> None:
    begin_tracing("test", collector.url, 1.0)
    try:
        with api_client(engine) as http:
            http.headers = httpx.Headers([(b"traceparent", traceparent.encode())])
            submit(http, many(1))
    finally:
        end_tracing()
    (request,) = collector.spans
    assert (request.parent_id, request.trace_id == TRACE) == ("", False)


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
    with engine.connect() as connection:
        assert connection.execute(text("SELECT traceparent FROM vectormill.jobs")).scalar_one() is None
    assert "trace_id" not in prompt.known[0]
