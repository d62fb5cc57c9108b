"""The commit of a finished chunk, and the check whether a COMMIT succeeded whose answer was lost.

This module knows nothing about models.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine

from vectormill.db.locks import limit_lock_wait
from vectormill.db.outages import DATABASE_ERRORS, describe_refusal, is_outage
from vectormill.domain.errors import DatabaseUnavailable, LeaseLost
from vectormill.files.roots import NOWHERE, Roots
from vectormill.jobs.chunk import DONE, ChunkOutcome, Claim
from vectormill.jobs.chunks import find_chunk, renew_leases
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.item import Item, Items
from vectormill.objects.parts import record_part, write_staged
from vectormill.ragged import Ragged
from worker.chunk.counts import ChunkCounts

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0

# The longest wait for a lock, as a share of a lease. A commit that waits for a lock, such as that of a CREATE
# INDEX, holds its chunk's row, so that the lease cannot be renewed. So the commit stops waiting in time,
# renews the lease, and waits again.
LOCK_WAIT_SHARE = 1 / 2  # of a lease


class Stopwatch:
    """The seconds since it was made, and the moment when they were last read."""

    def __init__(self) -> None:
        self._began = self.read_at = time.monotonic()

    def read(self) -> float:
        self.read_at = time.monotonic()
        return self.read_at - self._began


class PostgresSink:
    """Writes finished chunks to Postgres.

    Thread-safe: each commit takes a pooled connection for a short transaction.
    """

    def __init__(
        self,
        engine: Engine,
        stopping: threading.Event,
        lease_seconds: float = 30.0,
        counts: ChunkCounts | None = None,
        output_roots: Roots = NOWHERE,
    ) -> None:
        self._engine = engine
        self._stopping = stopping
        self._lease_seconds = lease_seconds
        self._counts = counts or ChunkCounts()
        self._output_roots = output_roots

    def commit(
        self,
        claim: Claim,
        items: Sequence[Item],
        encoded: npt.NDArray[np.int64],
        results: Ragged,
        outcome: ChunkOutcome,
    ) -> float:
        """Commit the chunk exactly once. Retry while this worker holds it, since results cost device time.

        Return the seconds that were spent too late to be counted in the job: waiting for the job's row, and
        COMMIT. Raises LeaseLost, DatabaseUnavailable if the worker is to stop, StorageUnavailable, and database
        errors that a retry does not cure.
        """
        watch = Stopwatch()
        lock_milliseconds = max(1, round(1000 * self._lease_seconds * LOCK_WAIT_SHARE))
        pause = _FIRST_PAUSE_SECONDS
        record: Callable[[Connection], object] | None = None
        if claim.output_url is not None:
            # The results of a job with an output are staged once, before the commit that makes them count.
            part, outcome = write_staged(
                self._engine, claim, Items.of(items), encoded, results, outcome, self._output_roots
            )

            def record(connection: Connection) -> None:
                if part is not None:
                    record_part(connection, claim, part)

        try:
            while True:
                try:
                    with self._engine.begin() as connection:
                        limit_lock_wait(connection, lock_milliseconds)
                        complete_chunk(
                            connection, claim, items, encoded, results, outcome, watch.read, record
                        )
                    break
                except DATABASE_ERRORS as error:
                    if not is_outage(error):
                        raise
                    logger.warning("Chunk %d could not be committed; retrying: %s", claim.chunk_id, error)
                    self._counts.note_wait(claim.chunk_id, describe_refusal(error))
                if self._was_committed(claim):
                    break
                if self._stopping.wait(pause):
                    raise DatabaseUnavailable
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            self._counts.note_wait(claim.chunk_id, None)
        return time.monotonic() - watch.read_at

    def _was_committed(self, claim: Claim) -> bool:
        """Return True if the chunk is done under our fence: it was committed and only the answer was lost.

        If this worker still holds the chunk, renew its lease and return False. Raises LeaseLost if another
        worker holds it.
        """
        try:
            with self._engine.begin() as connection:
                if renew_leases(connection, [claim], self._lease_seconds):
                    return False
                position = find_chunk(connection, claim.chunk_id)
        except DATABASE_ERRORS as error:
            if not is_outage(error):
                raise
            return False  # the database is still away; the fence decides at the next attempt
        if position is None or position.fence != claim.fence or position.state != DONE:
            raise LeaseLost
        return True
