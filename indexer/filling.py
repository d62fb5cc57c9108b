"""Filling: finish the first fill of a generation, whose rows were copied into tables without indexes.

Each step can be repeated, so an indexer that takes over a killed run goes on with whatever is left. See
vectormill/collections/fills.py.
"""

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection

from indexer.context import RunContext
from vectormill.collections.collection import Generation
from vectormill.collections.fills import close_fill, compose_indexes, finish_fill, has_fill, merge_rows
from vectormill.collections.generation_tables import filled_names
from vectormill.collections.generations import find_written
from vectormill.collections.indexes import analyze_table, run_build
from vectormill.db.locks import act_in_short_locks

# The scrubber of texts may be reading the fill.
PATIENCE_SECONDS: Final = 600.0


def end_fill(context: RunContext, generation_id: int) -> None:
    """Make the rows of the generation's fill, if it has one, ordinary rows. Raise Conflict if it was discarded."""
    with context.engine.connect() as connection:
        if not has_fill(connection, generation_id):
            return

    def pause(seconds: float) -> None:
        context.check()
        # This waits between two tries for a lock. A run that was cancelled or lost ends before the next one.
        time.sleep(seconds)

    def act(step: Callable[[Connection, Generation], None]) -> Generation:
        def hold_and_act(connection: Connection) -> Generation:
            context.hold(connection)  # first, because a run that was cancelled or lost must change nothing
            generation = find_written(connection, generation_id)
            step(connection, generation)
            return generation

        context.check()
        return act_in_short_locks(context.engine, hold_and_act, patience_seconds=PATIENCE_SECONDS, wait=pause)

    generation = act(close_fill)
    for statement in compose_indexes(generation):
        run_build(context.engine, generation_id, statement, {}, lambda _: context.check())
    with context.engine.begin() as connection:
        for name in filled_names(generation_id):
            analyze_table(connection, name)
    act(merge_rows)  # most of it before anybody has to wait
    act(finish_fill)
