"""An engine that returns each text's known vector at once, and a chunk encoder around it, without a model."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

import numpy as np
from sqlalchemy import Engine

from tests.database import ask, execute
from tests.protocol import LONG, SPEC, dispatch_all, vector_of
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job
from vectormill.jobs.transitions import rescue_unclaimed_chunks
from vectormill.ragged import Ragged
from vectormill.settings import Settings
from worker.chunk.chunk_encoder import ChunkEncoder
from worker.chunk.commit import PostgresSink
from worker.chunk.counts import ChunkCounts, Timesheet
from worker.chunk.leases import LeaseKeeper
from worker.engine.request import EncodeRequest, EncodeResult
from worker.identity import WorkerIdentity


class ObedientEngine:
    """An engine whose vectors are unique to their text.

    `before` is called with each request, and may raise.
    """

    def __init__(self, before: Callable[[EncodeRequest], object] = lambda request: None) -> None:
        self._before = before
        self.run_seconds = 0.0

    def is_healthy(self) -> bool:
        return True

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        self._before(request)
        n = len(request.texts)
        vectors = np.array([vector_of(given) for given in request.texts]).reshape(n, SPEC.dimensions)
        counts = np.full(n, 3, dtype=np.int32)
        is_cut = np.array([given.startswith(LONG) for given in request.texts], dtype=np.bool_)
        return EncodeResult(Ragged.from_matrix(vectors), {}, counts, 4 * n, is_cut, {"run": 0.1})


class FussyEngine(ObedientEngine):
    """An engine that fails blank texts until `is_fussy` is set to False."""

    is_fussy = True

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        blanks = [place for place, each in enumerate(request.texts) if self.is_fussy and not each.strip()]
        failures = dict.fromkeys(blanks, ItemFailure(EMPTY_TEXT, ""))
        return replace(super().encode(request, cancelled), failures=failures)


@contextmanager
def encoding_chunks(
    database: Engine,
    engine: ObedientEngine | None = None,
    *,
    heart: Engine | None = None,
    identity: WorkerIdentity | None = None,
    counts: ChunkCounts | None = None,
    read_period: Callable[[], int | None] = lambda: None,
    **settings: Any,
) -> Iterator[ChunkEncoder]:
    """Yield a chunk encoder whose leases are renewed during the block, through engine `heart` if given."""
    chosen = Settings(**{"heartbeat_seconds": 0.1, **settings})
    identity = identity or WorkerIdentity("obedient-cpu0@test", uuid4(), uuid4(), SPEC.model, slots=4)
    keeper = LeaseKeeper(
        heart or database,
        identity,
        dict,
        heartbeat_seconds=chosen.heartbeat_seconds,
        lease_seconds=chosen.lease_seconds,
    )
    stopping = threading.Event()
    encoding = engine or ObedientEngine()
    sink = PostgresSink(database, stopping, chosen.lease_seconds, output_roots=ANYWHERE)
    keeper.start()
    try:
        yield ChunkEncoder(
            database,
            cast(Any, encoding),
            keeper,
            sink,
            Timesheet(lambda: encoding.run_seconds),
            identity,
            chosen,
            counts=counts,
            read_period=read_period,
        )
    finally:
        stopping.set()
        keeper.stop()


def run_to_end(database: Engine, encoder: ChunkEncoder, job: Job, rounds: int = 60) -> tuple[Job, list[str]]:
    """Dispatch and encode chunks until the job ends, without waiting for backoffs.

    Return the job and the outcomes of its chunks, in order. Fail after `rounds` rounds.
    """
    outcomes = []
    for _ in range(rounds):
        execute(database, "UPDATE vectormill.chunks SET available_at = now() WHERE state = 'pending'")
        ask(database, rescue_unclaimed_chunks, timeout_seconds=-1)
        outcomes += [
            encoder.encode_chunk(dispatch.chunk_id)["outcome"] for dispatch in dispatch_all(database)
        ]
        found = ask(database, find_job, job.id)
        if found.is_terminal:
            return found, outcomes
    raise AssertionError(f"the job did not end: {outcomes}")
