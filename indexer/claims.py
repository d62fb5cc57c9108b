"""Claims: the runs that this indexer holds, each carried out in a thread, and the one heartbeat that keeps them all."""

import logging
import threading
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Connection, Engine

from indexer.phases.phases import Tools, carry_out
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.domain.errors import LeaseLost, RunCancelled
from vectormill.runs.run import CANCELLING, Run
from vectormill.runs.run_claims import claim_run
from vectormill.work.loop import Stopping
from vectormill.work.work import Lease

logger = logging.getLogger(__name__)


class HeldRun:
    """A claimed run, and what its heartbeat has heard of it."""

    def __init__(self, lease: Lease, run: Run, is_stopping: Callable[[], bool]) -> None:
        self.lease = lease
        self.run = run
        self._is_stopping = is_stopping
        self._state = run.state
        self._loss: LeaseLost | None = None

    def renew(self, connection: Connection) -> None:
        """Renew the lease, and hear whether a client has cancelled the run."""
        try:
            self._state = self.lease.renew(connection)
        except LeaseLost as error:
            self._loss = error

    def check(self) -> None:
        """Raise LeaseLost, Stopping or RunCancelled if the run is not to go on here."""
        if self._loss is not None:
            raise self._loss
        if self._is_stopping():
            raise Stopping
        if self._state == CANCELLING:
            raise RunCancelled


class Claims:
    """Holds at most `most` runs at a time. Safe for threads."""

    def __init__(self, engine: Engine, heart: Engine, owner: str, most: int, lease_seconds: float) -> None:
        self._engine = engine
        self._heart = heart
        self._owner = owner
        self._most = most
        self._lease_seconds = lease_seconds
        self._lock = threading.Lock()
        self._held: dict[UUID, HeldRun] = {}
        self._threads: dict[UUID, threading.Thread] = {}
        self.is_stopping = threading.Event()
        self._has_room = threading.Event()

    def claim(self, tools: Tools) -> bool:
        """Claim a run and begin it in a thread of its own; return False when there is none, or no room."""
        with self._lock:
            if len(self._held) >= self._most or self.is_stopping.is_set():
                return False
        with self._engine.begin() as connection:
            claimed = claim_run(connection, self._owner, self._lease_seconds)
        if claimed is None:
            return False
        held = HeldRun(*claimed, self.is_stopping.is_set)
        run_id = held.run.id
        thread = threading.Thread(target=self._carry_out, args=(held, tools), name=f"run-{run_id.hex[:8]}")
        with self._lock:
            self._held[run_id] = held
            self._threads[run_id] = thread
        thread.start()
        return True

    def wait_for_room(self, seconds: float) -> None:
        """Wait until a run has ended, after which another of its collection may begin, or for so long."""
        if self._has_room.wait(seconds):
            self._has_room.clear()

    def _carry_out(self, held: HeldRun, tools: Tools) -> None:
        run = held.run
        logger.info("Run %s of %s goes on in phase %s.", run.id, run.collection, run.phase)
        try:
            carry_out(held.lease, run, tools, held.check)
        except DATABASE_ERRORS as error:
            logger.warning("Run %s is left to its lease: Postgres cannot be reached: %s", run.id, error)
        finally:
            with self._lock:
                del self._held[run.id], self._threads[run.id]
            self._has_room.set()

    def renew(self) -> None:
        """Renew the leases of all runs. Raises an error of the database: leases go on until their time is over."""
        with self._lock:
            held = list(self._held.values())
        with self._heart.begin() as connection:
            for each in held:
                each.renew(connection)

    def stop(self) -> None:
        """Tell every run to end where it is, and wait for that."""
        self.is_stopping.set()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()
