"""Remove the texts of deleted items from payloads of jobs and from bulk loads, in the pruner's thread."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

import psycopg
from sqlalchemy import Engine

from vectormill.collections.bulk_loads import list_bulk_loads, remove_deleted
from vectormill.collections.tombstones import (
    Pass,
    Position,
    delete_scrubbed,
    find_next_job,
    find_oldest_open,
    find_pass,
    finish_pass,
    scrub_payloads,
)

# The chunks of one transaction: some 4 MiB of texts, compressed.
BATCH_PAYLOADS: Final = 4
# The time of one round in seconds; the pruner pauses between two.
ROUND_SECONDS: Final = 5.0
# A steady trickle of deletions must not cause all payloads of a collection to be read again and again: after
# a pass the collection rests for this many times the duration of the pass.
REST: Final = 9.0
LEAST_REST_SECONDS: Final = 1.0
PRUNE_SECONDS: Final = 60.0

logger = logging.getLogger(__name__)


class Scrubber:
    """The scrubber of one scheduler's term.

    Its position is lost with the term, but emptied texts stay empty.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._pass: Pass | None = None
        self._position: Position | None = None
        self._last_seq = 0
        self._num_emptied = 0
        self._work_seconds = 0.0
        self._rests_until: dict[int, float] = {}
        self._prune_due = 0.0

    def scrub(self, is_stopping: Callable[[], bool]) -> None:
        """Carry out one round: a few seconds of work at most, in batches."""
        if self._clock() >= self._prune_due:
            self._prune_due = self._clock() + PRUNE_SECONDS
            with self._engine.begin() as connection:
                delete_scrubbed(connection)
        began = self._clock()
        while not is_stopping() and self._clock() - began < ROUND_SECONDS:
            if self._pass is None and not self._begin_pass():
                return
            batch_began = self._clock()
            self._go_on()
            self._work_seconds += self._clock() - batch_began

    def _begin_pass(self) -> bool:
        """Find a collection that has texts to scrub and is not resting. Return whether there is one."""
        after = 0
        while True:
            with self._engine.begin() as connection:
                found = find_pass(connection, after)
            if found is None:
                return False
            after = found.collection_id if isinstance(found, Pass) else found
            if isinstance(found, Pass) and self._clock() >= self._rests_until.get(found.collection_id, 0.0):
                break
        self._pass, self._position, self._last_seq = found, None, 0
        self._num_emptied, self._work_seconds = 0, 0.0
        return True

    def _go_on(self) -> None:
        """Scrub the next payloads of the pass; end the pass after the last ones."""
        wanted = self._pass
        assert wanted is not None
        with self._engine.begin() as connection:
            if self._position is None:
                self._position = find_next_job(connection, wanted, self._last_seq)
            if self._position is not None:
                self._last_seq = self._position.job_seq
                try:
                    self._position, num_items = scrub_payloads(
                        connection, wanted, self._position, BATCH_PAYLOADS
                    )
                except LookupError:
                    self._end_pass(wanted)
                    return
                self._num_emptied += num_items
                return
            oldest = find_oldest_open(connection, wanted.collection_id)
        # If a job was retried or its twin was made meanwhile, its texts are still in use, so the deletions
        # are not marked as scrubbed yet.
        if oldest is None or oldest > wanted.seq:
            self._finish(wanted)
        self._end_pass(wanted)

    def _finish(self, wanted: Pass) -> None:
        with self._engine.connect() as connection:
            loads = list_bulk_loads(connection, wanted.collection_id)
        for generation in loads:
            # A bulk load that is gone by now was merged, without deleted rows, or discarded.
            with contextlib.suppress(psycopg.errors.UndefinedTable), self._engine.begin() as connection:
                remove_deleted(connection, generation)
        after: str | None = ""
        while after is not None:
            with self._engine.begin() as connection:
                after = finish_pass(connection, wanted, after)
        if self._num_emptied:
            logger.info("Removed %d texts of deleted items from payloads of jobs.", self._num_emptied)

    def _end_pass(self, wanted: Pass) -> None:
        self._rests_until[wanted.collection_id] = self._clock() + max(
            LEAST_REST_SECONDS, REST * self._work_seconds
        )
        self._pass = self._position = None
