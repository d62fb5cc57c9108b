"""Ends a worker that no longer consumes a filled queue, or whose engine died; the launcher starts it afresh.

Celery's Redis consumer has fallen silent after reconnects in every release so far (celery #8030, #8091, #9054, #10205);
this catches past and future ways alike.
"""

import logging
import os
import signal
import threading
import time

from sqlalchemy import Engine as Database
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from worker.engine import Engine
from worker.leases import LeaseKeeper

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
_IDLE_SECONDS = 45.0
_UNCLAIMED_SECONDS = 20.0
# Chunks are handed back in one short transaction each. What takes longer hangs, perhaps in Celery's own way to end; a
# hard end is safe at any moment, because whatever is written is written under a fence.
_ENDING_SECONDS = 60.0

HAS_UNCLAIMED = text("""
    SELECT EXISTS (
        SELECT 1 FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
         WHERE chunks.state = 'queued' AND jobs.model = :model
           AND chunks.queued_at < now() - make_interval(secs => :unclaimed_seconds))
""")


class Watchdog:
    """Looks every ten seconds; sends this process SIGTERM when it should be started afresh, then ends it hard."""

    def __init__(self, database: Database, model: str, keeper: LeaseKeeper, engine: Engine) -> None:
        self._database = database
        self._model = model
        self._keeper = keeper
        self._engine = engine
        self._idle_since = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            reason = self.find_reason(time.monotonic())
            if reason is not None:
                logger.error("%s; ending this worker so that it is started afresh.", reason)
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._stopping.wait(_ENDING_SECONDS):
                    logger.error("This worker did not end within %g s; it is ended hard.", _ENDING_SECONDS)
                    os._exit(1)
                return

    def find_reason(self, now: float) -> str | None:
        """Why this worker should be started afresh; None while all is well."""
        if not self._engine.is_healthy():
            return "The engine died"
        if self._keeper.num_held:
            self._idle_since = now
            return None
        if now - self._idle_since < _IDLE_SECONDS:
            return None
        try:
            with self._database.connect() as connection:
                values = {"model": self._model, "unclaimed_seconds": _UNCLAIMED_SECONDS}
                has_unclaimed = connection.execute(HAS_UNCLAIMED, values).scalar_one()
        except SQLAlchemyError:
            return None
        return "The queue has messages but none was received for a while" if has_unclaimed else None
