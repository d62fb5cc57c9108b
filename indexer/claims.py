"""Claims: the runs that this indexer holds, each carried out in a thread, and the one heartbeat that keeps them all."""

import logging
import threading
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from indexer.phases.phases import Tools, carry_out
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.db.runs.run_claims import RunClaim, claim_run, fail_exhausted, renew_runs
from vectormill.domain.errors import LeaseLost, RunCancelled
from vectormill.domain.run import CANCELLING
from vectormill.work.loop import Stopping

logger = logging.getLogger(__name__)


class _Held:
    """A claim, and what its heartbeat has heard."""

    def __init__(self, claim: RunClaim) -> None:
        self.claim = claim
        self.is_lost = threading.Event()
        self.is_cancelled = threading.Event()
        if claim.run.state == CANCELLING:  # before we had it
            self.is_cancelled.set()


class Claims:
    """At most `most` runs at a time. `work` carries one out; safe for threads."""

    def __init__(self, engine: Engine, heart: Engine, owner: str, most: int, lease_seconds: float) -> None:
        self._engine = engine
        self._heart = heart
        self._owner = owner
        self._most = most
        self._lease_seconds = lease_seconds
        self._lock = threading.Lock()
        self._held: dict[UUID, _Held] = {}
        self._threads: dict[UUID, threading.Thread] = {}
        self.is_stopping = threading.Event()
        self._has_room = threading.Event()

    def claim(self, tools: Tools) -> bool:
        """Takes a run and begins it in a thread of its own; False when there is none, or no room."""
        with self._lock:
            if len(self._held) >= self._most or self.is_stopping.is_set():
                return False
        with self._engine.begin() as connection:
            claim = claim_run(connection, self._owner, self._lease_seconds)
            if claim is None or fail_exhausted(connection, claim, tools.settings.max_attempts):
                return claim is not None
        held = _Held(claim)
        thread = threading.Thread(
            target=self._carry_out, args=(held, tools), name=f"run-{claim.run.id.hex[:8]}"
        )
        with self._lock:
            self._held[claim.run.id] = held
            self._threads[claim.run.id] = thread
        thread.start()
        return True

    def wait_for_room(self, seconds: float) -> None:
        """Until a run has ended, after which another of its collection may begin, or for so long."""
        if self._has_room.wait(seconds):
            self._has_room.clear()

    def _carry_out(self, held: _Held, tools: Tools) -> None:
        run = held.claim.run
        logger.info("Run %s of %s goes on in phase %s.", run.id, run.collection, run.phase)
        try:
            carry_out(held.claim, tools, lambda: self._check(held))
        except DATABASE_ERRORS as error:
            logger.warning("Run %s is left to its lease: Postgres cannot be reached: %s", run.id, error)
        finally:
            with self._lock:
                del self._held[run.id], self._threads[run.id]
            self._has_room.set()

    def _check(self, held: _Held) -> None:
        if held.is_lost.is_set():
            raise LeaseLost("The run's lease expired and another indexer may hold it; nothing was written.")
        if self.is_stopping.is_set():
            raise Stopping
        if held.is_cancelled.is_set():
            raise RunCancelled

    def renew(self) -> None:
        """One heartbeat for all. Raises an error of the database: leases go on until their time is over."""
        with self._lock:
            held = dict(self._held)
        if not held:
            return
        with self._heart.begin() as connection:
            ours = renew_runs(connection, [each.claim for each in held.values()], self._lease_seconds)
        for run_id, each in held.items():
            if run_id not in ours:
                each.is_lost.set()
            elif ours[run_id]:
                each.is_cancelled.set()

    def stop(self, wait: Callable[[threading.Thread], None] = threading.Thread.join) -> None:
        """Tells every run to end where it is, and waits for that."""
        self.is_stopping.set()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            wait(thread)
