"""The indexer process: claims runs and carries out a few at a time, each in a thread. Any number may run.

A thread beside them follows tables, and two bring request batches on. It needs Postgres alone, and outlives its
outages: a run whose indexer was away for longer than its lease is another's.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Engine

from indexer.batches import BatchKeeper
from indexer.claims import Claims
from indexer.context import RunContext
from indexer.follower import Follower
from indexer.opening import open_run_source
from indexer.phases.phases import Tools
from indexer.phases.reading import RunSource
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.db.session import make_engine
from vectormill.domain.errors import ConfigurationError
from vectormill.models.registry import Registry
from vectormill.processes.stopping import StopSignals
from vectormill.runs.stages import drop_left_stages
from vectormill.settings import Settings
from vectormill.work.loop import name_owner
from vectormill.workers.workers import beat_indexer

logger = logging.getLogger(__name__)

# One look at an index of the runs that are open. Nothing is listened to, so a pooler may be between.
_POLL_SECONDS: Final = 0.25
_TIDY_SECONDS: Final = 60.0
_OUTAGE_SECONDS: Final = 1.0


def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    if settings.database_url is None:
        raise ConfigurationError(
            "The indexer needs VECTORMILL_DATABASE_URL; `vectormill up` brings its own Postgres."
        )
    with StopSignals() as stop:
        serve(settings, settings.database_url, Registry(settings.models), stop, open_run_source)


def serve(
    settings: Settings,
    database_url: str,
    registry: Registry,
    stop: threading.Event,
    open_source: Callable[[RunContext], RunSource],
) -> None:
    """Carry out runs until `stop`; then hand back what it has."""
    most = settings.indexer_runs
    # Two for each run: its own, and that of a job which it uploads or a source here which it reads; and one to claim.
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
        with Follower(database_url, settings, registry), BatchKeeper(database_url, settings, registry, owner):
            while not stop.is_set():
                try:
                    _serve_connected(engine, claims, tools, settings, stop)
                except DATABASE_ERRORS as error:
                    logger.warning("Postgres cannot be reached; trying again: %s", error)
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
    """Claim what there is, until Postgres cannot be reached or the process is told to stop."""
    tidy_at = 0.0
    while not stop.is_set():
        if time.monotonic() >= tidy_at:
            tidy_at = time.monotonic() + _TIDY_SECONDS
            _tidy(engine)
        while claims.claim(tools):
            pass
        claims.wait_for_room(_POLL_SECONDS)


def _tidy(engine: Engine) -> None:
    with engine.begin() as connection:
        drop_left_stages(connection)


def _beat(claims: Claims, heart: Engine, seconds: float, stop: threading.Event) -> None:
    """Renew the leases of all runs, and the indexer's own heartbeat. Runs are handed back at once after `stop`."""
    is_over = False
    while not is_over:
        try:
            claims.renew()
            with heart.begin() as connection:
                beat_indexer(connection)
        except DATABASE_ERRORS as error:
            logger.warning("No heartbeat: Postgres cannot be reached: %s", error)
        is_over = stop.wait(seconds)
