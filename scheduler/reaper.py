"""Repair: chunks that a dead worker, a lost message or a faulty model process left behind become pending again."""

import logging
import time
from typing import Final

from sqlalchemy import Engine

from vectormill.jobs.chunks import read_clock
from vectormill.jobs.recomputation import list_computed_chunks, recompute_chunk
from vectormill.jobs.transitions import (
    end_cancelled_jobs,
    end_finished_jobs,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)
from vectormill.settings import Settings
from vectormill.workers.proofs import FailedPeriod, list_unrepaired_periods, note_repair

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


logger = logging.getLogger(__name__)

PAGE_CHUNKS: Final = 10_000
# After this time no further page is read in a round, since the dispatcher waits for it.
ROUND_SECONDS: Final = 0.2


class Recomputer:
    """The repairs of one scheduler's term. A new term reads all chunks from the beginning, which is harmless."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._period: FailedPeriod | None = None
        self._after = 0  # the id of the last chunk that was read for the period
        self._num_mended = self._num_suspect = self._num_missed = 0

    def recompute(self) -> None:
        """Put chunks of a failed period back until all chunks were read, or the time of a round is over."""
        end = time.monotonic() + ROUND_SECONDS
        if self._period is None:
            with self._engine.connect() as connection:
                self._period = next(iter(list_unrepaired_periods(connection)), None)
            self._after = self._num_mended = self._num_suspect = self._num_missed = 0
        while self._period is not None and time.monotonic() < end:
            self._mend_page(self._period)

    def _mend_page(self, period: FailedPeriod) -> None:
        with self._engine.connect() as connection:
            last, found = list_computed_chunks(connection, period.id, self._after, PAGE_CHUNKS)
        for chunk_id in found:
            with self._engine.begin() as connection:
                is_mended = recompute_chunk(
                    connection, chunk_id, period.id, f"encoded again: {period.reason}"
                )
            self._num_missed += is_mended is None
            self._num_mended += is_mended is True
            self._num_suspect += is_mended is False
        if last is not None:
            self._after = last
            return
        if (
            self._num_missed
        ):  # among those that were read before may be what somebody held, or halves of what was split
            self._after = self._num_missed = 0
            return
        with self._engine.begin() as connection:
            note_repair(connection, period.id)
        logger.error(
            "The worker %s was faulty: %s. %d chunks that it had committed since its last good proof are encoded "
            "again; %d cannot be, and are suspect.",
            period.worker,
            period.reason,
            self._num_mended,
            self._num_suspect,
        )
        self._period = None
