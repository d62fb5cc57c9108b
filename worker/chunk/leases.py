"""LeaseKeeper renews leases, notices lost leases and cancelled jobs, and sends the worker's heartbeats.

It uses one thread with its own connection, so that no busy pool, long COPY or slow forward pass
lets leases lapse. A driver that hangs does not either: reports are made on another thread, and a
heartbeat carries the latest one.

A batch mixes texts of several chunks, and a crash affects all of them. So a chunk that was in a batch when a
process died is encoded alone, in quarantine, and the next crash shows whether it is to blame.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from vectormill.db.locks import limit_lock_wait
from vectormill.jobs.chunk import Claim
from vectormill.jobs.chunks import renew_leases
from vectormill.jobs.job import CANCELLING
from vectormill.workers.workers import delete_worker
from worker.engine.request import CANCEL_POLL_SECONDS, EncodingCancelled
from worker.identity import WorkerIdentity, beat_as

logger = logging.getLogger(__name__)

LOCK_MILLISECONDS = 2000


@dataclass(slots=True)
class ChunkLease:
    """A claimed chunk.

    `ended` is set when encoding should stop. Then `is_lost` says whether the lease was lost or the job cancelled.
    """

    claim: Claim
    ended: threading.Event = field(default_factory=threading.Event)
    is_lost: bool = False


class LeaseKeeper:
    """Renews leases and sends heartbeats.

    Start it before the first claim; `stop` deletes the worker's row.
    """

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        report: Callable[[], Mapping[str, Any]],
        *,
        heartbeat_seconds: float,
        lease_seconds: float,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._report = report
        self._heartbeat_seconds = heartbeat_seconds
        self._lease_seconds = lease_seconds
        self._leases: dict[int, ChunkLease] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Register the worker and start the heartbeats.

        Raise SQLAlchemyError if the database is not available.
        """
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)
        try:
            with self._engine.begin() as connection:
                delete_worker(connection, self._identity.name, self._identity.incarnation)
        except SQLAlchemyError as error:
            logger.warning(
                "Could not remove the worker's row; the worker stays listed until its heartbeat is overdue: %s",
                error,
            )

    @property
    def num_held(self) -> int:
        return len(self._leases)

    @property
    def num_held_tokens(self) -> int:
        """Return the estimated tokens of all held chunks."""
        with self._lock:
            return sum(lease.claim.num_tokens for lease in self._leases.values())

    @contextmanager
    def hold(self, lease: ChunkLease) -> Iterator[None]:
        """Renew the lease while the block runs, including its commit.

        Renewal skips a chunk's row while the commit has locked it.
        """
        chunk_id = lease.claim.chunk_id
        with self._lock:
            earlier = self._leases.get(chunk_id)
            self._leases[chunk_id] = lease
        if earlier is not None:
            # The earlier lease of this chunk had lapsed, and another thread of this worker has claimed the
            # chunk.
            _end(earlier, is_lost=True)
        try:
            yield
        finally:
            with self._lock:
                if self._leases.get(chunk_id) is lease:
                    del self._leases[chunk_id]

    def _run(self) -> None:
        while not self._stopping.wait(self._heartbeat_seconds):
            try:
                self._renew()
                self._beat()
            except SQLAlchemyError as error:
                # Go on encoding: the work can still be committed if nobody has claimed the chunk in the
                # meantime.
                logger.warning("The heartbeat did not reach Postgres; retrying: %s", error)
            except Exception:  # no error may end this thread
                logger.exception("Could not renew leases; retrying")

    def _beat(self) -> None:
        report = self._report()
        with self._engine.begin() as connection:
            limit_lock_wait(connection, LOCK_MILLISECONDS)
            if beat_as(connection, self._identity, report):
                return
            # This worker was cut off for so long that another took its name. The owner's name is unique.
            self._identity = replace(self._identity, name=self._identity.owner)
            beat_as(connection, self._identity, report)
        logger.warning(
            "Another worker has taken this worker's name; this worker is now called %s.", self._identity.name
        )

    def _renew(self) -> None:
        with self._lock:
            leases = list(self._leases.values())
        if not leases:
            return
        with self._engine.begin() as connection:
            limit_lock_wait(connection, LOCK_MILLISECONDS)
            job_states = renew_leases(connection, [lease.claim for lease in leases], self._lease_seconds)
        for lease in leases:
            state = job_states.get(lease.claim.chunk_id)
            if state is None or state == CANCELLING:
                _end(lease, is_lost=state is None)


def _end(lease: ChunkLease, *, is_lost: bool) -> None:
    lease.is_lost = is_lost  # set before `ended`, because waiting threads read it then
    lease.ended.set()


class Quarantine:
    """Lets chunks in together, but a suspect only alone, after all others have left. Thread-safe.

    Chunks that arrive later wait for a waiting suspect.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False  # a suspect is inside or waiting

    @contextmanager
    def enter(self, cancelled: threading.Event, *, is_suspect: bool) -> Iterator[None]:
        """Enter, alone if the chunk is suspect, and leave after the block.

        Raise EncodingCancelled if cancelled while waiting.
        """
        with self._changed:
            while self._is_closed:
                self._pause(cancelled)
            self._is_closed = is_suspect
            try:
                while is_suspect and self._num_inside:
                    self._pause(cancelled)
            except EncodingCancelled:
                self._open()
                raise
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                if is_suspect:
                    self._open()
                self._changed.notify_all()

    def _pause(self, cancelled: threading.Event) -> None:
        self._changed.wait(CANCEL_POLL_SECONDS)
        if cancelled.is_set():
            raise EncodingCancelled

    def _open(self) -> None:
        self._is_closed = False
        self._changed.notify_all()
