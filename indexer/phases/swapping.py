"""Swapping: a generation that has passed its canary becomes the live one, in one transaction that holds nobody up.

Before its COMMIT everything is as it was, after it everything is new; whoever takes a killed run over finds one or the
other.
"""

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection

from indexer.context import RunContext
from vectormill.db.collections.generations import find_generation_by_id
from vectormill.db.collections.swaps import Swap, swap_generations
from vectormill.db.short_locks import act_in_short_locks
from vectormill.domain.collection import BUILDING
from vectormill.domain.errors import SwapRefused
from vectormill.domain.run import SWAPPING

# So long users' queries on the view, and clients' puts whose twins are behind, may keep the swap from its moment.
PATIENCE_SECONDS: Final = 600.0
_PAUSE_SECONDS: Final = 0.5

Wait = Callable[[float], object]


def swap(context: RunContext, wait: Wait = time.sleep) -> None:
    """Makes the run's generation live, unless it is so already. Raises SwapRefused, LocksHeld and Conflict."""
    generation_id = context.run.generation_id
    if generation_id is None:
        return
    with context.engine.connect() as connection:
        generation = find_generation_by_id(connection, generation_id)
    if generation is None or generation.state != BUILDING:
        return

    def pause(seconds: float) -> None:
        context.check()
        wait(seconds)

    def exchange(connection: Connection) -> Swap | None:
        context.hold(connection)  # first: a run that was cancelled or lost must change nothing
        return swap_generations(connection, generation_id)

    until = time.monotonic() + PATIENCE_SECONDS
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
        if time.monotonic() > until:
            raise SwapRefused(
                f"Collection {generation.collection!r} was not swapped: what clients have put waits to be encoded by "
                f"{generation.spec.model}; check that its workers keep up, and run again."
            )
        pause(_PAUSE_SECONDS)


def _describe(done: Swap) -> dict[str, object]:
    return {
        "live": done.live.id,
        "retired": done.retired.id,
        "fingerprint": done.live.spec.fingerprint(),
        "was": done.retired.spec.fingerprint(),
    }
