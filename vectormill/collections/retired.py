"""Retired generations: their tables go when their time is over, and never under anybody's hands."""

from typing import Final

from sqlalchemy import Connection, Engine, text

from vectormill.collections.generations import (
    FROM_GENERATIONS,
    GENERATION_COLUMNS,
    IS_CARRIED_FROM,
    lock_collection,
)
from vectormill.collections.rows.attributes import attributes_name
from vectormill.collections.rows.generation_tables import table_name
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.errors import LocksHeld
from vectormill.jobs.job import OPEN_JOB_STATES
from vectormill.jobs.twins import cancel_unwanted_jobs
from vectormill.runs.run import CLAIMED_RUN_STATES

# Whoever found a generation when it was live has ended his search or read his page by then.
GRACE_SECONDS: Final = 300.0

# One that never was live is wanted by nobody. While a job or a run writes a generation, its tables stay.
_WHERE_PRUNABLE = f"""
     WHERE generations.state = 'retired'
       AND (generations.live_at IS NULL
            OR generations.retired_at < now() - make_interval(secs => CAST(:seconds AS double precision)))
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.jobs
            WHERE jobs.generation_id = generations.id
              AND jobs.state IN {OPEN_JOB_STATES})
       AND NOT EXISTS (
           SELECT 1 FROM vectormill.runs
            WHERE runs.generation_id = generations.id AND runs.state IN {CLAIMED_RUN_STATES})
       AND NOT {IS_CARRIED_FROM}
"""

LIST_PRUNABLE = text(f"""
    SELECT {GENERATION_COLUMNS} {FROM_GENERATIONS}
{_WHERE_PRUNABLE}
     ORDER BY generations.id LIMIT 100
""")

IS_PRUNABLE = text(f"""
    SELECT {GENERATION_COLUMNS} {FROM_GENERATIONS}
{_WHERE_PRUNABLE} AND generations.id = :generation_id
""")

MARK_PRUNED = text("UPDATE vectormill.generations SET state = 'pruned' WHERE id = :generation_id")


def prune_retired_generations(engine: Engine, retention_seconds: float) -> int:
    """Drops the tables of retired generations past their time, and of those that were given up; how many.

    One whose table is in use is left for the next round.
    """
    cancel_unwanted_jobs(engine)
    seconds = max(retention_seconds, GRACE_SECONDS)
    with engine.connect() as connection:
        prunable = connection.execute(LIST_PRUNABLE, {"seconds": seconds}).all()
    num_pruned = 0
    for row in prunable:

        def drop(connection: Connection, generation_id: int = row.id, collection: str = row.name) -> int:
            lock_collection(connection, collection)
            values = {"generation_id": generation_id, "seconds": seconds}
            if connection.execute(IS_PRUNABLE, values).one_or_none() is None:
                return 0  # rolled back to at this moment
            connection.execute(MARK_PRUNED, values)
            for table in (attributes_name(generation_id), table_name(generation_id)):
                connection.execute(text(f"DROP TABLE IF EXISTS vectormill.{table}"))
            return 1

        try:
            num_pruned += act_in_short_locks(engine, drop, patience_seconds=0)
        except LocksHeld:
            continue
    return num_pruned
