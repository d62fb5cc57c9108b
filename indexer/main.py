"""The indexer process claims runs and carries out a few at a time, each in a thread. Any number may run.

A further thread follows tables, two carry out request batches, two read inputs, and two keep outputs. The indexer
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
from indexer.loops import BatchLoop, InputLoop, OutputLoop
from indexer.phases import Tools, carry_out
from indexer.reindexing import open_run_source
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.db.session import make_engine
from vectormill.domain.errors import LeaseLost, RunCancelled
from vectormill.jobs.jobs import is_model_in_use
from vectormill.models.registry import Registry, open_registry
from vectormill.processes.garbage import collect_seldom
from vectormill.processes.stopping import StopSignals
from vectormill.runs.differences import drop_left_stages
from vectormill.runs.run import CANCELLING, Run
from vectormill.runs.runs import claim_run
from vectormill.settings import Settings
from vectormill.sources.reader import Reader
from vectormill.work.work import Lease, Loop, Stopping, name_owner
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


# A poll is one look-up in an index of open runs. Notifications of Postgres are not used, so that a connection pooler
# may be in between.
_POLL_SECONDS: Final = 0.25
_TIDY_SECONDS: Final = 60.0
_OUTAGE_SECONDS: Final = 1.0


class RunLoop(Loop):
    """Carry out runs, each in one of as many threads as the settings allow."""

    def __init__(
        self,
        database_url: str,
        settings: Settings,
        registry: Registry,
        owner: str,
        open_source: Callable[[RunContext], Reader],
    ) -> None:
        most = settings.indexer_runs
        super().__init__("runs", pause_seconds=_OUTAGE_SECONDS, num_threads=most)
        # Each run uses up to two connections: its own, and one for a job that it uploads or a source in this
        # Postgres that it reads. One more is for claiming.
        self._engine = make_engine(
            database_url, application_name="vectormill indexer", pool_size=most + 1, max_overflow=most
        )
        self._owner = owner
        self._lease_seconds = settings.lease_seconds
        self._tools = Tools(self._engine, settings, registry, open_source, self.stopping.wait)
        self._turn = threading.Lock()
        self._held: dict[UUID, HeldRun] = {}
        self._tidy_at = 0.0

    def close(self) -> None:
        self._engine.dispose()

    def step(self) -> bool:
        """Claim a run and carry it out. One thread at a time looks for a run, or waits for Postgres."""
        with self._turn:
            if self.stopping.is_set():
                return False
            try:
                if time.monotonic() >= self._tidy_at:
                    self._tidy_at = time.monotonic() + _TIDY_SECONDS
                    drop_left_stages(self._engine)
                with self._engine.begin() as connection:
                    claimed = claim_run(connection, self._owner, self._lease_seconds)
            except DATABASE_ERRORS:
                self.stopping.wait(_OUTAGE_SECONDS)
                raise
            if claimed is None:
                self.stopping.wait(_POLL_SECONDS)
                return True
            held = HeldRun(*claimed, self.stopping.is_set)
            self._held[held.run.id] = held
        run = held.run
        logger.info("Run %s of %s continues in phase %s.", run.id, run.collection, run.phase)
        try:
            carry_out(held.lease, run, self._tools, held.check)
        except DATABASE_ERRORS as error:
            logger.warning("Run %s waits for its lease to expire: cannot reach Postgres: %s", run.id, error)
        finally:
            del self._held[run.id]
        return True

    def renew(self, connection: Connection) -> None:
        """Renew the leases of all runs that this process holds, each of which notes if it is lost or cancelled."""
        for held in list(self._held.values()):
            held.renew(connection)


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
    heart = make_engine(
        database_url, application_name="vectormill indexer leases", pool_size=1, max_overflow=0
    )
    owner = name_owner()
    runs = RunLoop(database_url, settings, registry, owner, open_source)
    heartbeat = threading.Thread(
        target=_beat, args=(runs, heart, settings.heartbeat_seconds, stop), name="heartbeat"
    )
    heartbeat.start()
    try:
        with (
            runs,
            Follower(database_url, settings, registry),
            BatchLoop(database_url, settings, registry, owner),
            InputLoop(database_url, settings, owner),
            OutputLoop(database_url, settings, owner),
        ):
            stop.wait()
    finally:
        stop.set()
        heartbeat.join()
        heart.dispose()


def _beat(runs: RunLoop, heart: Engine, seconds: float, stop: threading.Event) -> None:
    """Send the heartbeat: renew the leases of all runs, and record that this indexer is alive.

    Leases stay valid until they expire if Postgres cannot be reached. Once `stop` is set, this ends at once, since all
    runs are being handed back.
    """
    is_over = False
    while not is_over:
        try:
            with heart.begin() as connection:
                runs.renew(connection)
            with heart.begin() as connection:
                beat_indexer(connection)
        except DATABASE_ERRORS as error:
            logger.warning("Heartbeat failed: cannot reach Postgres: %s", error)
        is_over = stop.wait(seconds)
