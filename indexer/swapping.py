"""Swapping: a generation that has passed its canary becomes the live one, in one transaction that holds nobody up.

Before its COMMIT everything is as it was, after it everything is new; whoever takes a killed run over finds one or the
other.
"""

import logging
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

from sqlalchemy import Connection

from indexer.context import RunContext
from vectormill.collections.collection import BUILDING, Generation
from vectormill.collections.generations import find_generation_by_id
from vectormill.collections.swaps import (
    Swap,
    hold_back_jobs,
    list_lagging_twins,
    swap_generations,
)
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.errors import SwapRefused
from vectormill.runs.run import SWAPPING

logger = logging.getLogger(__name__)

# So long users' queries on the view, and clients' puts whose twins are behind, may keep the swap from its moment.
PATIENCE_SECONDS: Final = 600.0
# So long it is tried at first without holding anything back, and then as long with it; each time twice as long.
FIRST_TURN_SECONDS: Final = 5.0
# Jobs are held back for at most this long after the last try: an indexer that was killed lets go.
HELD_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.5

Wait = Callable[[float], object]
Clock = Callable[[], float]


def swap(context: RunContext, wait: Wait = time.sleep, clock: Clock = time.monotonic) -> None:
    """Make the run's generation live, unless it is so already. Raise SwapRefused, LocksHeld and Conflict."""
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
        context.hold(connection)  # first: a run that was cancelled or lost must change nothing
        return swap_generations(connection, generation_id)

    until = clock() + PATIENCE_SECONDS
    while True:
        context.check()
        done = act_in_short_locks(
            context.engine,
            exchange,
            patience_seconds=PATIENCE_SECONDS,
            wait=pause,
        )
        if done is not None:
            context.report(SWAPPING, _describe(done))
            return
        if clock() > until:
            raise SwapRefused(
                f"Collection {generation.collection!r} was not swapped: what clients have put waits to be encoded by "
                f"{generation.spec.model}; check that its workers keep up, and run again."
            )
        pause(_PAUSE_SECONDS)


class _Turns:
    """Alternate between the live generation's jobs and their twins, for which those jobs are held back.

    Under a steady stream of jobs there is always one that has ended before its twin. While they are held back no
    further one ends, and the twins catch up. Their turn comes only when some have ended during the last one: jobs do
    not wait for a model that has no worker.
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
        """Begin the next turn if this one is over; in one of the twins, hold the jobs back for a moment more."""
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
                    "Jobs into %s wait for up to %g s, so that their twins catch up.",
                    self._building.collection,
                    self._seconds,
                )
        if self._is_of_twins:
            with self._context.engine.begin() as connection:
                hold_back_jobs(connection, self._building, HELD_SECONDS)

    def _list_lagging(self) -> set[UUID]:
        with self._context.engine.connect() as connection:
            return list_lagging_twins(connection, self._building.id)


def _describe(done: Swap) -> dict[str, object]:
    return {
        "live": done.live.id,
        "retired": done.retired.id,
        "fingerprint": done.live.spec.fingerprint(),
        "was": done.retired.spec.fingerprint(),
    }
