"""Swapping: make a generation that passed its canary live, in one transaction that does not block others.

Before its COMMIT nothing has changed, and after it everything has, so an indexer that takes over a killed run
finds one state or the other.
"""

import logging
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

from sqlalchemy import Connection

from indexer.context import RunContext, Wait
from vectormill.collections.collection import BUILDING, Generation
from vectormill.collections.collections import find_generation_by_id
from vectormill.collections.generations import (
    Swap,
    hold_back_jobs,
    list_lagging_twins,
    swap_generations,
)
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.errors import SwapRefused
from vectormill.jobs.dual_writes import add_missing_twins
from vectormill.runs.run import SWAPPING

logger = logging.getLogger(__name__)

# How long users' queries on the view, or lagging twins of clients' puts, may delay the swap.
PATIENCE_SECONDS: Final = 600.0
# The length of the first turns, without and then with jobs held back; it doubles after each such pair.
FIRST_TURN_SECONDS: Final = 5.0
# Jobs are held back for at most this long after the last try, so that they go on if an indexer is killed.
HELD_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.5

Clock = Callable[[], float]


def swap(context: RunContext, wait: Wait = time.sleep, clock: Clock = time.monotonic) -> None:
    """Make the run's generation live, unless it already is. Raise SwapRefused, LocksHeld or Conflict."""
    generation_id = context.run.generation_id
    if generation_id is None:
        return
    with context.engine.connect() as connection:
        generation = find_generation_by_id(connection, generation_id)
    if generation is None or generation.state != BUILDING:
        return
    turns = _Turns(context, generation, clock)

    def pause(seconds: float) -> None:
        context.check()
        turns.take()
        wait(seconds)

    def exchange(connection: Connection) -> Swap | None:
        context.hold(connection)  # first, because a run that was cancelled or lost must change nothing
        return swap_generations(connection, generation_id)

    until = clock() + PATIENCE_SECONDS
    while True:
        context.check()
        add_missing_twins(context.engine, generation)  # of large jobs, and of those that were retried
        done = act_in_short_locks(
            context.engine,
            exchange,
            patience_seconds=PATIENCE_SECONDS,
            wait=pause,
        )
        if done is not None:
            live, retired = done.live, done.retired
            fingerprints = {"fingerprint": live.spec.fingerprint(), "was": retired.spec.fingerprint()}
            context.report(SWAPPING, {"live": live.id, "retired": retired.id, **fingerprints})
            return
        if clock() > until:
            raise SwapRefused(
                f"Collection {generation.collection!r} was not swapped: items that clients have put are "
                f"still waiting to be encoded by {generation.spec.model}; check that its workers keep up, "
                "and start the run again."
            )
        pause(_PAUSE_SECONDS)


class _Turns:
    """Take turns between the live generation's jobs and, with these jobs held back, their twins.

    Under a steady stream of jobs there is always one that has ended before its twin. While jobs are held back
    no further one ends, and the twins catch up. The twins get a turn only if some caught up during the last
    one, so that jobs do not wait for a model that has no worker.
    """

    def __init__(self, context: RunContext, building: Generation, clock: Clock) -> None:
        self._context = context
        self._building = building
        self._clock = clock
        self._seconds = FIRST_TURN_SECONDS
        self._ends_at = clock() + self._seconds
        self._is_of_twins = False
        self._lagging = self._list_lagging()

    def take(self) -> None:
        """Begin the next turn if this one is over. In a turn of the twins, hold jobs back a bit longer."""
        if self._clock() >= self._ends_at:
            lagging = self._list_lagging()
            is_advancing = bool(self._lagging - lagging)
            if self._is_of_twins:
                self._seconds *= 2
            self._is_of_twins = not self._is_of_twins and is_advancing
            self._lagging = lagging
            self._ends_at = self._clock() + self._seconds
            if self._is_of_twins:
                logger.info(
                    "Jobs that write to %s are held back for up to %g s so that their twins catch up.",
                    self._building.collection,
                    self._seconds,
                )
        if self._is_of_twins:
            with self._context.engine.begin() as connection:
                hold_back_jobs(connection, self._building, HELD_SECONDS)

    def _list_lagging(self) -> set[UUID]:
        with self._context.engine.connect() as connection:
            return list_lagging_twins(connection, self._building.id)
