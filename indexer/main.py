"""The indexer process claims runs and carries out a few at a time, each in a thread. Any number may run.

A further thread follows tables, two carry out request batches, two read inputs, and one keeps outputs. The indexer
needs only Postgres and survives its outages: if it is away for longer than a run's lease, another indexer takes over
the run.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, Engine

from indexer.context import RunContext
from indexer.follower import Follower
from indexer.keepers import BatchKeeper, InputKeeper, OutputKeeper
from indexer.phases import Tools, carry_out
from indexer.reindexing import open_run_source
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.db.session import make_engine
from vectormill.domain.errors import LeaseLost, RunCancelled
from vectormill.jobs.in_use import is_model_in_use
from vectormill.models.registry import Registry, open_registry
from vectormill.processes.garbage import collect_seldom
from vectormill.processes.stopping import StopSignals
from vectormill.runs.differences import drop_left_stages
from vectormill.runs.run import CANCELLING, Run
from vectormill.runs.runs import claim_run
from vectormill.settings import Settings
from vectormill.sources.reader import Reader
from vectormill.work.loop import Stopping, name_owner
from vectormill.work.work import Lease
from vectormill.workers.workers import beat_indexer

logger = logging.getLogger(__name__)


class HeldRun:
    """A claimed run with its lease, and the state that the last heartbeat found."""

    def __init__(self, lease: Lease, run: Run, is_stopping: Callable[[], bool]) -> None:
        self.lease = lease
        self.run = run
        self._is_stopping = is_stopping
        self._state = run.state
        self._loss: LeaseLost | None = None

    def renew(self, connection: Connection) -> None:
        """Renew the lease, and note its loss or a client's cancellation for `check`."""
        try:
            self._state = self.lease.renew(connection)
        except LeaseLost as error:
            self._loss = error

    def check(self) -> None:
        """Raise LeaseLost, Stopping or RunCancelled if this process must not continue the run."""
        if self._loss is not None:
            raise self._loss
        if self._is_stopping():
            raise Stopping
        if self._state == CANCELLING:
            raise RunCancelled


class Claims:
    """Claim runs and carry them out in threads, at most `most` at a time. Thread-safe."""

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
        """Claim a run and start it in a thread; return False if there is none or all threads are busy."""
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
        """Wait until a run has ended, so that another may start, or `seconds` have passed."""
        if self._has_room.wait(seconds):
            self._has_room.clear()

    def _carry_out(self, held: HeldRun, tools: Tools) -> None:
        run = held.run
        logger.info("Run %s of %s continues in phase %s.", run.id, run.collection, run.phase)
        try:
            carry_out(held.lease, run, tools, held.check)
        except DATABASE_ERRORS as error:
            logger.warning("Run %s waits for its lease to expire: cannot reach Postgres: %s", run.id, error)
        finally:
            with self._lock:
                del self._held[run.id], self._threads[run.id]
            self._has_room.set()

    def renew(self) -> None:
        """Renew the leases of all runs that this process holds.

        Raise an error of the database if Postgres cannot be reached; leases then stay valid until they
        expire.
        """
        with self._lock:
            held = list(self._held.values())
        with self._heart.begin() as connection:
            for each in held:
                each.renew(connection)

    def stop(self) -> None:
        """Tell all runs to stop where they are, and wait for their threads."""
        self.is_stopping.set()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()


# A poll is one look-up in an index of open runs. Notifications of Postgres are not used, so that a connection pooler
# may be in between.
_POLL_SECONDS: Final = 0.25
_TIDY_SECONDS: Final = 60.0
_OUTAGE_SECONDS: Final = 1.0


def run(settings: Settings) -> None:
    """Run the indexer until SIGTERM or SIGINT."""
    collect_seldom()
    with StopSignals() as stop:
        url = settings.need("database_url")
        engine = make_engine(url, application_name="vectormill-indexer models", pool_size=1)
        registry = open_registry(settings, is_in_use=partial(is_model_in_use, engine))
        serve(settings, url, registry, stop, open_run_source)


def serve(
    settings: Settings,
    database_url: str,
    registry: Registry,
    stop: threading.Event,
    open_source: Callable[[RunContext], Reader],
) -> None:
    """Carry out runs until `stop` is set, then hand back those in progress."""
    most = settings.indexer_runs
    # Each run uses up to two connections: its own, and one for a job that it uploads or a source in this
    # Postgres that it reads. One more is for claiming.
    engine = make_engine(
        database_url, application_name="vectormill indexer", pool_size=most + 1, max_overflow=most
    )
    heart = make_engine(
        database_url, application_name="vectormill indexer leases", pool_size=1, max_overflow=0
    )
    owner = name_owner()
    claims = Claims(engine, heart, owner, most, settings.lease_seconds)
    tools = Tools(engine, settings, registry, open_source, claims.is_stopping.wait)
    heartbeat = threading.Thread(
        target=_beat, args=(claims, heart, settings.heartbeat_seconds, stop), name="heartbeat"
    )
    heartbeat.start()
    try:
        with (
            Follower(database_url, settings, registry),
            BatchKeeper(database_url, settings, registry, owner),
            InputKeeper(database_url, settings, owner),
            OutputKeeper(database_url, settings, owner),
        ):
            while not stop.is_set():
                try:
                    _serve_connected(engine, claims, tools, settings, stop)
                except DATABASE_ERRORS as error:
                    logger.warning("Cannot reach Postgres; retrying: %s", error)
                    stop.wait(_OUTAGE_SECONDS)
    finally:
        stop.set()
        claims.stop()
        heartbeat.join()
        engine.dispose()
        heart.dispose()


def _serve_connected(
    engine: Engine, claims: Claims, tools: Tools, settings: Settings, stop: threading.Event
) -> None:
    """Claim runs until Postgres cannot be reached or `stop` is set."""
    tidy_at = 0.0
    while not stop.is_set():
        if time.monotonic() >= tidy_at:
            tidy_at = time.monotonic() + _TIDY_SECONDS
            with engine.begin() as connection:
                drop_left_stages(connection)
        while claims.claim(tools):
            pass
        claims.wait_for_room(_POLL_SECONDS)


def _beat(claims: Claims, heart: Engine, seconds: float, stop: threading.Event) -> None:
    """Send the heartbeat: renew the leases of all runs, and record that this indexer is alive.

    Once `stop` is set, this ends at once, since all runs are being handed back.
    """
    is_over = False
    while not is_over:
        try:
            claims.renew()
            with heart.begin() as connection:
                beat_indexer(connection)
        except DATABASE_ERRORS as error:
            logger.warning("Heartbeat failed: cannot reach Postgres: %s", error)
        is_over = stop.wait(seconds)
