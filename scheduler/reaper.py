"""The reaper: makes chunks pending again that a dead worker or a lost message left behind."""

import logging
from typing import Final

from sqlalchemy import Engine

from vectormill.jobs.chunks import read_clock
from vectormill.jobs.transitions import (
    end_cancelled_jobs,
    end_finished_jobs,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)
from vectormill.settings import Settings

logger = logging.getLogger(__name__)

# The statement that ends unfinished jobs reads all open ones, and should find none.
FINISHED_SECONDS: Final = 600.0


class Reaper:
    """The crash recovery of one scheduler's term.

    No worker can renew a lease while the database is away. So at the beginning of the term, and whenever
    rounds were missed or the clock was set, the reaper takes no lease until workers have had one lease time
    to renew theirs.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._queued_timeout_seconds = settings.queued_timeout_seconds
        self._lease_seconds = settings.lease_seconds
        self._longest_gap_seconds = settings.reap_seconds + settings.lease_seconds / 2
        self._last_round: float | None = None
        self._patient_until = 0.0
        self._finished_due = 0.0

    def reap(self) -> int:
        """Carry out one round, each repair in a short transaction.

        Return how many chunks become `pending` again.
        """
        with self._engine.begin() as connection:
            now = read_clock(connection)
            if self._last_round is None or now - self._last_round > self._longest_gap_seconds:
                self._patient_until = now + self._lease_seconds
            self._last_round = now
            expired = 0 if now < self._patient_until else rescue_expired_chunks(connection)
        with self._engine.begin() as connection:
            unclaimed = rescue_unclaimed_chunks(connection, self._queued_timeout_seconds)
        with self._engine.begin() as connection:
            recall_paused_chunks(connection)
        with self._engine.begin() as connection:
            end_cancelled_jobs(connection)
        if now >= self._finished_due:
            self._finished_due = now + FINISHED_SECONDS
            if num_jobs := end_finished_jobs(self._engine):
                logger.warning("Ended %d jobs whose last chunk had ended without them.", num_jobs)
        if expired:
            logger.warning(
                "%d chunks had an expired lease: their worker died or was cut off. They are encoded again.",
                expired,
            )
        if unclaimed:
            logger.warning(
                "%d dispatched chunks were not claimed in time; they are dispatched again.", unclaimed
            )
        return expired + unclaimed
