"""Commits a finished chunk, and finds out what became of a COMMIT whose answer was lost. Knows nothing of models."""

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from vectormill.db.chunks import find_chunk
from vectormill.db.completion import complete_chunk
from vectormill.domain.chunk import DONE, LEASED, ChunkOutcome, Claim
from vectormill.domain.errors import DatabaseUnavailable, LeaseLost
from vectormill.domain.item import Item

logger = logging.getLogger(__name__)

# The vectors cost device time and wait in memory, so an outage is sat out; after this long the lease is surely gone.
_PATIENCE_SECONDS = 120.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0


class PostgresSink:
    """Thread-safe; every commit takes a connection of the pool for one short transaction."""

    def __init__(self, engine: Engine, stopping: threading.Event) -> None:
        self._engine = engine
        self._stopping = stopping

    def commit(
        self,
        claim: Claim,
        items: Sequence[Item],
        encoded: npt.NDArray[np.int64],
        vectors: npt.NDArray[np.float32],
        outcome: ChunkOutcome,
    ) -> float:
        """Commits once, whatever happens on the way. Raises LeaseLost, or DatabaseUnavailable when patience ends.

        Returns the seconds that came too late to be counted in the job: its own row's turn, and COMMIT.
        """
        start = time.monotonic()
        counted = 0.0

        def read_persist_seconds() -> float:
            nonlocal counted
            counted = time.monotonic() - start
            return counted

        waited = 0.0
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                with self._engine.begin() as connection:
                    complete_chunk(connection, claim, items, encoded, vectors, outcome, read_persist_seconds)
                return time.monotonic() - start - counted
            except DBAPIError as error:
                if not _may_pass(error):
                    raise
                logger.warning("Chunk %d could not be committed yet: %s", claim.chunk_id, error.orig)
            if self._was_committed(claim):
                return time.monotonic() - start - counted
            if waited >= _PATIENCE_SECONDS or self._stopping.wait(pause):
                raise DatabaseUnavailable
            waited += pause
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _was_committed(self, claim: Claim) -> bool:
        """Reads the chunk again: done under our fence means that only the answer was lost.

        Raises LeaseLost when the chunk is no longer ours.
        """
        try:
            with self._engine.connect() as connection:
                position = find_chunk(connection, claim.chunk_id)
        except DBAPIError:
            return False  # still away; the fence decides at the next try
        if position is None or position.fence != claim.fence or position.state not in (DONE, LEASED):
            raise LeaseLost
        return position.state == DONE


def _may_pass(error: DBAPIError) -> bool:
    """Whether trying again can help: the connection broke, a lock was not had, or a deadlock chose us."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated or sqlstate is None:
        return True
    # 08 connection, 40 rollback, 53 out of resources, 55P03 lock timeout, 57 operator intervention, 25006 read-only.
    return sqlstate[:2] in ("08", "40", "53", "57") or sqlstate in ("55P03", "25006")
