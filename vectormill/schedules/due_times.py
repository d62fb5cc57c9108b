"""Due times become runs: exactly one for each, whoever looks at the clock, however often, and wherever it is killed.

The clock is the database's. A due time's run and the schedule's next due time are one transaction, and the run is
unique by (schedule_id, due_at); so two schedulers at once, or one that died after any statement, make no second run and
lose none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from vectormill.domain.errors import InvalidOption
from vectormill.moments import describe_moment
from vectormill.runs.run import FAILED, OPEN_RUN_STATES, QUEUED, REINDEX, SKIPPED, Run
from vectormill.runs.runs import create_run
from vectormill.schedules.cron import newest_due, next_due
from vectormill.schedules.schedule import SKIP
from vectormill.schedules.schedules import lock_schedule

# A schedule whose due times cannot be computed here is looked at again so much later.
UNREADABLE_PAUSE: Final = timedelta(hours=1)

LIST_DUE_SCHEDULES = text("""
    SELECT id FROM vectormill.schedules
     WHERE paused_at IS NULL AND next_due_at <= now() ORDER BY next_due_at LIMIT 100
""")


def list_due_schedules(connection: Connection) -> Sequence[int]:
    """Ids, the longest due first."""
    return list(connection.execute(LIST_DUE_SCHEDULES).scalars())


@dataclass(frozen=True, slots=True)
class Firing:
    """The outcome of one due time. `reason` says why the run was not queued."""

    schedule: str
    due_at: datetime
    run_id: UUID | None
    state: str
    reason: str | None = None


# Looked at again under its lock: whoever was first has moved the due time on. SKIP LOCKED also passes a schedule over
# whose collection is being deleted, which would wait for this schedule while this waits for the collection.
LOCK_DUE_SCHEDULE = text("""
    SELECT schedules.id, schedules.name, schedules.collection_id, collections.name AS collection, schedules.cron,
           schedules.timezone, schedules.overlap, schedules.options, schedules.next_due_at, now() AS now
      FROM vectormill.schedules
      JOIN vectormill.collections ON collections.id = schedules.collection_id
     WHERE schedules.id = :id AND schedules.paused_at IS NULL AND schedules.next_due_at <= now()
       FOR UPDATE OF schedules SKIP LOCKED
       FOR KEY SHARE OF collections SKIP LOCKED
""")

# Runs of any origin: a run that a client started reads the same source.
FIND_OPEN_RUN = text(f"""
    SELECT id, state, created_at
      FROM vectormill.runs
     WHERE collection_id = :collection_id AND kind = 'reindex'
       AND state IN {OPEN_RUN_STATES}
     ORDER BY created_at LIMIT 1
""")

FIND_QUEUED_RUN = text("""
    SELECT id, state, created_at
      FROM vectormill.runs WHERE schedule_id = :schedule_id AND state = 'queued' ORDER BY created_at LIMIT 1
""")

MOVE_DUE_TIME = text("""
    UPDATE vectormill.schedules SET next_due_at = :next_due_at WHERE id = :id
""")


def fire_schedule(connection: Connection, schedule_id: int) -> Firing | None:
    """Makes the run of a schedule that is due, in the caller's transaction; None when somebody else did or does.

    Of several due times that nobody was there for the newest makes a run, and the others none: each would read the
    same source.
    """
    row = connection.execute(LOCK_DUE_SCHEDULE, {"id": schedule_id}).one_or_none()
    if row is None:
        return None
    try:
        due_at = newest_due(row.cron, row.timezone, row.next_due_at, row.now)
        later = next_due(row.cron, row.timezone, row.now)
        state, reason = _decide(connection, row)
    except InvalidOption as error:  # the tz database of this machine lost a zone
        due_at, later = row.next_due_at, row.now + UNREADABLE_PAUSE
        state, reason = FAILED, str(error)
    run = _create_run(connection, row, due_at, state, reason)
    connection.execute(MOVE_DUE_TIME, {"id": row.id, "next_due_at": later})
    return Firing(row.name, due_at, None if run is None else run.id, state, reason)


def _decide(connection: Connection, row: Row[Any]) -> tuple[str, str | None]:
    """The state of the new run, and the reason when it is not to be carried out."""
    if row.overlap == SKIP:
        other = connection.execute(FIND_OPEN_RUN, {"collection_id": row.collection_id}).one_or_none()
        if other is None:
            return QUEUED, None
        return SKIPPED, (
            f"Run {other.id}, of {describe_moment(other.created_at)}, was still {other.state}; the schedule skips what "
            "overlaps."
        )
    other = connection.execute(FIND_QUEUED_RUN, {"schedule_id": row.id}).one_or_none()
    if other is None:
        return QUEUED, None
    # Or a run that hangs for a day would leave a queue of runs that all read the same source.
    return SKIPPED, (
        f"Run {other.id}, of {describe_moment(other.created_at)}, had not begun; it reads the source as it is then."
    )


def run_schedule_now(connection: Connection, name: str) -> UUID:
    """A run beside the due times; it waits for one that is going on. Raises ScheduleNotFound."""
    run = _create_run(connection, lock_schedule(connection, name), None, QUEUED, None)
    assert run is not None  # without a due time it collides with none
    return run.id


def _create_run(
    connection: Connection, row: Row[Any], due_at: datetime | None, state: str, reason: str | None
) -> Run | None:
    return create_run(
        connection,
        row.collection,
        REINDEX,
        options=row.options,
        state=state,
        schedule_id=row.id,
        due_at=due_at,
        error=reason,
    )
