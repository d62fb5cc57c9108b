"""A process of many simulated workers, which claim and commit chunks by the real statements and have no device.

`python -m benchmarks.children.fleet ORDER`: each worker is registered, sends heartbeats and renews its leases like
a real one. Workers share the connections of the process. Of a chunk in the sample the items are read and a part is
staged; of any other chunk only a row is recorded, of a part, so that nobody opens the object that does not exist.
"""

import base64
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
import numpy as np
from msgspec import Struct
from redis import Redis
from sqlalchemy import Connection, Engine

from vectormill.broker.queues import list_of
from vectormill.db.locks import limit_lock_wait
from vectormill.db.session import make_engine
from vectormill.domain.errors import LeaseLost
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.chunks import ClaimedChunk, claim_chunk, renew_leases
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.job import DEFAULT_PRIORITY
from vectormill.objects.manifest import OutputPart
from vectormill.objects.parts import name_part, name_staged, record_part, write_staged
from vectormill.objects.reference import decode_reference
from vectormill.ragged import Ragged
from vectormill.workers.workers import beat_worker, name_owner

PART_BYTES: Final = 256 << 20
LOCK_MILLISECONDS: Final = 15_000
# About as many bytes as a real worker reports of its devices and stages.
REPORT: Final = {"state": "running", "stages": {f"stage {number}": 0.123 for number in range(60)}}


class FleetOrder(Struct, frozen=True, kw_only=True):
    """The order for one process of simulated workers, which appends a line of measurements to `log` each second."""

    database_url: str
    redis_url: str
    model: str
    name: str
    num_workers: int
    slots: int
    num_connections: int
    device_seconds: float
    lease_seconds: float
    heartbeat_seconds: float
    sample_end: int
    log: str


@dataclass(slots=True)
class SimulatedWorker:
    """One worker: its name and incarnation, and the claims that it holds by chunk id."""

    name: str
    incarnation: UUID = field(default_factory=uuid4)
    held: dict[int, Claim] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return name_owner(self.name, self.incarnation)


class Fleet:
    """All workers of this process. `run` does not return."""

    def __init__(self, order: FleetOrder) -> None:
        self._order = order
        self._engine = self._connect("fleet", order.num_connections)
        self._committing = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._workers = [SimulatedWorker(f"{order.name}-{number}") for number in range(order.num_workers)]
        self._slots = threading.Semaphore(order.num_workers * order.slots)
        # The threads take their next step from the first queue. The second one holds the chunks that are on a device;
        # all take the same time, so they become ready in their order.
        self._steps: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._encoding: SimpleQueue[tuple[float, Callable[[], None]]] = SimpleQueue()
        self._claims: list[float] = []
        self._commits: list[float] = []
        self._num_lost = 0

    def _connect(self, name: str, size: int) -> Engine:
        return make_engine(self._order.database_url, application_name=name, pool_size=size, max_overflow=0)

    def run(self) -> None:
        beats = self._connect("fleet leases", 1)
        for worker in self._workers:
            self._beat(beats, worker)
        targets = [self._serve] * self._order.num_connections
        for target in (*targets, self._listen, self._wait_for_devices, self._write_log):
            threading.Thread(target=target, daemon=True).start()
        while True:
            began = time.monotonic()
            for worker in self._workers:
                self._beat(beats, worker)
            time.sleep(max(0.0, self._order.heartbeat_seconds - (time.monotonic() - began)))

    def _beat(self, engine: Engine, worker: SimulatedWorker) -> None:
        order = self._order
        with engine.begin() as connection:
            if held := list(worker.held.values()):
                renew_leases(connection, held, order.lease_seconds)
            beat_worker(connection, worker.name, worker.incarnation, order.model, order.slots, REPORT)

    def _listen(self) -> None:
        """Take messages while a slot is free."""
        redis = Redis.from_url(self._order.redis_url)
        queue = list_of(self._order.model, DEFAULT_PRIORITY)
        while True:
            self._slots.acquire()
            while (found := redis.brpop([queue], timeout=1)) is None:
                continue
            body: Any = json.loads(base64.b64decode(json.loads(found[1])["body"]))
            self._steps.put(partial(self._claim, body[1]["chunk_id"]))

    def _wait_for_devices(self) -> None:
        """Let each chunk be committed once its device has had its time."""
        while True:
            ready_at, commit = self._encoding.get()
            time.sleep(max(0.0, ready_at - time.monotonic()))
            self._steps.put(commit)

    def _serve(self) -> None:
        while True:
            self._steps.get()()

    def _claim(self, chunk_id: int) -> None:
        order = self._order
        worker = min(self._workers, key=lambda worker: len(worker.held))
        began = time.perf_counter()
        with self._committing.connect() as connection:
            claimed = claim_chunk(connection, chunk_id, worker.owner, order.model, order.lease_seconds)
        self._claims.append(time.perf_counter() - began)
        if claimed is None:
            self._slots.release()
            return
        worker.held[chunk_id] = claimed.claim
        ready_at = time.monotonic() + order.device_seconds
        self._encoding.put((ready_at, partial(self._commit, worker, claimed)))

    def _commit(self, worker: SimulatedWorker, claimed: ClaimedChunk) -> None:
        claim = claimed.claim
        encoded = np.arange(claim.num_items, dtype=np.int64)
        tokens = 8 * claim.num_items
        outcome = ChunkOutcome({}, tokens, tokens, stage_seconds={"run": self._order.device_seconds})
        results = Ragged.from_matrix(np.ones((claim.num_items, claim.spec.dimensions), dtype=np.float32))
        record: Callable[[Connection], object] | None = None
        if claim.output_url is not None:
            part: OutputPart | None = OutputPart(
                name_part(name_staged(claim)), claim.first_item, claim.num_items, PART_BYTES
            )
            if claim.first_item < self._order.sample_end:
                assert claimed.payload is not None, "the payloads of open chunks are never removed"
                items = decode_reference(claimed.payload).read()
                part, outcome = write_staged(self._engine, claim, items, encoded, results, outcome, ANYWHERE)
            assert part is not None, "no item of the sample fails"
            record = partial(record_part, claim=claim, part=part)
        began = time.perf_counter()
        try:
            with self._engine.begin() as connection:
                limit_lock_wait(connection, LOCK_MILLISECONDS)
                complete_chunk(connection, claim, [], encoded, results, outcome, None, record)
            self._commits.append(time.perf_counter() - began)
        except LeaseLost:
            self._num_lost += 1
        worker.held.pop(claim.chunk_id, None)
        self._slots.release()

    def _write_log(self) -> None:
        with Path(self._order.log).open("ab", buffering=0) as log:
            while True:
                time.sleep(1.0)
                claims, self._claims = self._claims, []
                commits, self._commits = self._commits, []
                line = {
                    "claims": [round(1000 * each, 2) for each in claims],
                    "commits": [round(1000 * each, 2) for each in commits],
                    "lost": self._num_lost,
                }
                log.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    Fleet(msgspec.json.decode(sys.argv[1], type=FleetOrder)).run()
