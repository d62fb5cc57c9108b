"""Remove what is past its retention, and fail jobs whose model no worker could load for too long.

Removed are deleted jobs, ended jobs, abandoned uploads, files of requests, dead workers, deliveries of
webhooks, old Idempotency-Keys, and generations that others have replaced. The pruner has a thread and a
connection of its own, because a job of ten million vectors takes minutes to remove. Duties and jobs take turns, so
none waits for the end of another.
"""

import logging
import time
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from scheduler.scrubber import Scrubber
from vectormill.batches.batches import delete_old_batches
from vectormill.batches.files import delete_file_batch, discard_old_files
from vectormill.collections.generations import prune_retired_generations
from vectormill.collections.removals import drop_orphaned_tables
from vectormill.db.idempotency import delete_old_keys
from vectormill.db.outages import is_outage
from vectormill.domain.errors import LocksHeld
from vectormill.jobs.deletion import (
    delete_batch,
    delete_dead_workers,
    delete_forgotten_queries,
    discard_ended_puts,
    discard_expired_jobs,
    discard_stale_uploads,
    lock_discarded_job,
)
from vectormill.jobs.partitions import delete_removed, keep_partitions, shrink_partitions
from vectormill.jobs.wait_reasons import fail_waiting_chunks, find_stuck_jobs
from vectormill.runs.runs import prune_runs
from vectormill.sources.pushes import prune_pushes
from vectormill.webhooks.webhooks import prune_deliveries
from vectormill.work.work import Loop
from vectormill.workers.proofs import prune_periods

logger = logging.getLogger(__name__)

# The chunks of a job that its first transaction deletes, and later ones at most. Postgres keeps long values in
# pieces, so 100 chunks of 1 MiB of text are some 50,000 rows, while chunks by reference are one row each.
BATCH_CHUNKS = 100
MOST_CHUNKS = 10_000
# A transaction that takes no longer than this is followed by one of twice its size.
QUICK_SECONDS = 0.2
BATCH_ERRORS = 10_000
# The chunks that one transaction fails. Each has up to 2,048 items by default, and each item becomes a row.
BATCH_FAILED_CHUNKS = 10
BATCH_DELIVERIES = 10_000
BATCH_JOBS = 1_000
BATCH_RUNS = 1_000
# After this time the other duties get their turn, and the removal continues afterwards.
DELETING_SECONDS = 2.0
_PAUSE_SECONDS = 10.0
_STOP_SECONDS = 5.0


def plan_batch(num_chunks: int, seconds: float) -> int:
    """Return the chunks that the next transaction deletes after one that deleted `num_chunks` in `seconds`."""
    if seconds <= QUICK_SECONDS:
        return min(2 * num_chunks, MOST_CHUNKS)
    return num_chunks if seconds <= 2 * QUICK_SECONDS else max(num_chunks // 2, 1)


class Pruner(Loop):
    """A loop that removes old data.

    If it is killed in the middle of a job, the next pruner continues there.
    """

    def __init__(
        self,
        engine: Engine,
        retention_seconds: float,
        upload_timeout_seconds: float,
        retired_seconds: float = 7 * 86400,
        load_failure_seconds: float = 86400,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # A batch that takes longer is rolled back when the process ends.
        super().__init__("pruning", pause_seconds=_PAUSE_SECONDS, stop_seconds=_STOP_SECONDS)
        self._engine = engine
        self._retired_seconds = retired_seconds
        self._load_failure_seconds = load_failure_seconds
        self._retention_seconds = retention_seconds
        self._upload_timeout_seconds = upload_timeout_seconds
        self._clock = clock
        self._has_more = False
        self._last_seq = 0  # of the job that had the last turn
        self._num_chunks: dict[UUID, int] = {}  # by job, that the next transaction deletes
        self._may_shrink = True
        self._scrubber = Scrubber(engine)

    def step(self) -> bool:
        self._has_more = False
        self.prune()
        self._take_turn(lambda: self._scrubber.scrub(self.stopping.is_set))
        return self._has_more

    def prune(self) -> int:
        """Carry out one round, in which each duty has a turn of at most a few seconds.

        Return the number of jobs removed.
        """
        for duty in (self._discard, self._drop_tables, self._fail_stuck_jobs, self._delete_files):
            self._take_turn(duty)
        num_jobs = self._take_turn(self._delete_jobs)
        for duty in (self._keep_partitions, self._delete_removed):
            self._take_turn(duty)
        return num_jobs

    def _take_turn(self, duty: Callable[[], int | None]) -> int:
        """Return the result of a duty. An error of its own is logged, and must not take the turns of the others."""
        try:
            return duty() or 0
        except Exception as error:
            if is_outage(error):
                raise
            logger.exception("Retrying after an error in pruning.")
            return 0

    def _is_over(self, now: float, until: float) -> bool:
        """Return True if the turn of a duty is over, which has more to do then, or if the pruner stops."""
        self._has_more |= now >= until
        return now >= until or self.stopping.is_set()

    def _discard(self) -> None:
        with self._engine.begin() as connection:
            num_uploads = discard_stale_uploads(connection, self._upload_timeout_seconds)
            num_expired = discard_expired_jobs(connection, self._retention_seconds, BATCH_JOBS)
            num_puts = discard_ended_puts(connection, limit=BATCH_JOBS)
            self._has_more |= BATCH_JOBS in (num_expired, num_puts)
            delete_dead_workers(connection)
            delete_forgotten_queries(connection)
            prune_pushes(connection, self._upload_timeout_seconds)
            discard_old_files(connection, self._upload_timeout_seconds)
            prune_deliveries(connection, self._retention_seconds, BATCH_DELIVERIES)
            delete_old_batches(connection, self._retention_seconds)
            delete_old_keys(connection)
            prune_periods(connection, self._retention_seconds)
        with self._engine.begin() as connection:
            prune_runs(connection, self._retention_seconds, BATCH_RUNS)
        if num_uploads:
            logger.info("Removing %d uploads whose client went silent.", num_uploads)

    def _drop_tables(self) -> None:
        num_generations = prune_retired_generations(self._engine, self._retired_seconds)
        if num_generations:
            logger.info("Dropped the tables of %d replaced generations.", num_generations)
        num_tables = drop_orphaned_tables(self._engine)
        if num_tables:
            logger.info("Dropped %d tables of deleted collections.", num_tables)

    def _delete_jobs(self) -> int:
        """Remove discarded jobs for at most DELETING_SECONDS, a batch of each in turn. Return the number of jobs."""
        num_jobs = 0
        now = self._clock()
        until = now + DELETING_SECONDS
        while not self._is_over(now, until):
            with self._engine.begin() as connection:
                job = lock_discarded_job(connection, self._last_seq)
                if job is None:
                    break
                num_chunks = self._num_chunks.pop(job.id, BATCH_CHUNKS)
                is_gone = delete_batch(connection, job.id, num_chunks, BATCH_ERRORS)
            self._last_seq = job.seq
            began, now = now, self._clock()
            num_jobs += is_gone
            if not is_gone:
                self._num_chunks[job.id] = plan_batch(num_chunks, now - began)
        if num_jobs:
            logger.info("Removed %d jobs that were deleted or past their retention period.", num_jobs)
        return num_jobs

    def _keep_partitions(self) -> None:
        try:
            num_dropped = keep_partitions(self._engine)
        except LocksHeld:
            logger.info("Partitions of texts and results are locked, perhaps by a dump; trying again later.")
            return
        if num_dropped:
            logger.info("Dropped %d partitions of texts and results whose jobs are gone.", num_dropped)

    def _delete_removed(self) -> None:
        """Delete texts and results of deleted chunks beside others that stay, for at most DELETING_SECONDS."""
        num_rows, now = 1, self._clock()
        until = now + DELETING_SECONDS
        while not self._is_over(now, until):
            with self._engine.begin() as connection:
                num_done = delete_removed(connection, num_rows)
            self._may_shrink |= num_done > 0
            if num_done < num_rows:
                break
            began, now = now, self._clock()
            num_rows = plan_batch(num_rows, now - began)
        if self._may_shrink:
            self._may_shrink = False
            shrink_partitions(self._engine)

    def _fail_stuck_jobs(self) -> None:
        """Fail pending chunks of jobs whose model cannot be loaded, for at most DELETING_SECONDS.

        Later rounds continue.
        """
        with self._engine.begin() as connection:
            reasons = find_stuck_jobs(connection, self._load_failure_seconds)
        until = self._clock() + DELETING_SECONDS
        for job_id, reason in reasons.items():
            logger.warning("Failing job %s, which has waited too long: %s", job_id, reason)
            num_failed = BATCH_FAILED_CHUNKS
            while num_failed == BATCH_FAILED_CHUNKS:
                if self._is_over(self._clock(), until):
                    return
                with self._engine.begin() as connection:
                    num_failed = fail_waiting_chunks(connection, job_id, reason, BATCH_FAILED_CHUNKS)

    def _delete_files(self) -> None:
        num_files = 0
        until = self._clock() + DELETING_SECONDS
        while not self._is_over(self._clock(), until):
            with self._engine.begin() as connection:
                is_gone = delete_file_batch(connection)
            if is_gone is None:
                break
            num_files += is_gone
        if num_files:
            logger.info("Removed %d request files that were deleted or had expired.", num_files)
