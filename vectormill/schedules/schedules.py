"""Schedules in the database: create, change, pause and find them, and create exactly one run per due time.

All times are by the database's clock. A due time's run and the schedule's next due time are written in one
transaction, and runs are unique by (schedule_id, due_at). So concurrent schedulers, or one that dies after
any statement, neither create a second run nor lose one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import (
    CollectionNotFound,
    Conflict,
    InvalidOption,
    ScheduleNotFound,
    SourceNotFound,
)
from vectormill.moments import describe_moment
from vectormill.runs.run import (
    FAILED,
    FINISHED_RUN_STATES,
    GOOD_RUN_STATES,
    HELD,
    MISSED_RUN_STATES,
    OPEN_RUN_STATES,
    QUEUED,
    REINDEX,
    SKIPPED,
)
from vectormill.runs.runs import create_run
from vectormill.schedules.schedule import (
    SCHEDULE_NAME,
    SKIP,
    NewSchedule,
    Schedule,
    ScheduleCounts,
    check_cron,
    check_overlap,
    find_timezone,
    newest_due,
    next_due,
)
from vectormill.sources.source import PUSH
from vectormill.sources.sources import LOCK_SOURCE

# The counts read the runs of one schedule since its last success, through the index of (schedule_id, created_at).
SCHEDULES_WITH_RUNS = f"""
    SELECT schedules.id, schedules.name, collections.name AS collection, schedules.cron, schedules.timezone,
           schedules.overlap, schedules.options, schedules.next_due_at, schedules.paused_at, schedules.created_at,
           schedules.updated_at, last.state AS last_state, last.created_at AS last_run_at,
           success.finished_at AS last_success_at, since.num_failures, since.num_skipped, since.last_error,
           now() AS now
      FROM vectormill.schedules
      JOIN vectormill.collections ON collections.id = schedules.collection_id
      LEFT JOIN LATERAL (SELECT state, created_at FROM vectormill.runs
                          WHERE schedule_id = schedules.id ORDER BY created_at DESC LIMIT 1) AS last ON true
      LEFT JOIN LATERAL (SELECT created_at, finished_at FROM vectormill.runs
                          WHERE schedule_id = schedules.id AND state IN {GOOD_RUN_STATES}
                          ORDER BY created_at DESC LIMIT 1) AS success ON true
     CROSS JOIN LATERAL (SELECT CAST(count(*) FILTER (WHERE state = 'failed') AS integer) AS num_failures,
                                CAST(count(*) FILTER (WHERE state = 'skipped') AS integer) AS num_skipped,
                                (array_agg(error ORDER BY created_at DESC))[1] AS last_error
                           FROM vectormill.runs
                          WHERE schedule_id = schedules.id AND state IN {MISSED_RUN_STATES}
                            AND created_at > coalesce(success.created_at, '-infinity')) AS since
"""

FIND_SCHEDULE = text(f"{SCHEDULES_WITH_RUNS} WHERE schedules.name = :name")

LIST_SCHEDULES = text(f"""{SCHEDULES_WITH_RUNS}
     WHERE schedules.id > coalesce(CAST(:after AS bigint), 0)
     ORDER BY schedules.id
     LIMIT CAST(:limit AS integer)
""")


def find_schedule(connection: Connection, name: str) -> Schedule:
    """Return a schedule with a summary of its runs. Raise ScheduleNotFound."""
    row = connection.execute(FIND_SCHEDULE, {"name": name}).one_or_none()
    if row is None:
        raise _not_found(name)
    return Schedule(**row._mapping)


def list_schedules(
    connection: Connection, *, after: int | None = None, limit: int = 200
) -> Sequence[Schedule]:
    """List schedules, oldest first; `after` is the id of the last schedule of the previous page."""
    values = {"after": after, "limit": limit}
    return [Schedule(**row._mapping) for row in connection.execute(LIST_SCHEDULES, values)]


INSERT_SCHEDULE = text("""
    INSERT INTO vectormill.schedules (name, collection_id, cron, timezone, overlap, options, next_due_at)
    VALUES (:name, :collection_id, :cron, :timezone, :overlap, CAST(:options AS jsonb), :next_due_at)
    ON CONFLICT (name) DO NOTHING
    RETURNING name
""")


def create_schedule(connection: Connection, new: NewSchedule) -> Schedule:
    """Create a schedule, which is first due after the database's current time.

    Raise InvalidOption, CollectionNotFound, SourceNotFound, or Conflict if the name is taken.
    """
    if not SCHEDULE_NAME.fullmatch(new.name):
        raise InvalidOption(
            f"Invalid schedule name {new.name[:80]!r}: use at most 63 letters, digits, '.', '_' and '-', starting with "
            "a letter, a digit or '_'."
        )
    cron = check_cron(new.cron)
    collection = connection.execute(LOCK_SOURCE, {"collection": new.collection}).one_or_none()
    if collection is None:
        raise CollectionNotFound.named(new.collection)
    if collection.kind is None:
        raise SourceNotFound
    if collection.kind == PUSH:
        raise InvalidOption(
            f"Collection {new.collection!r} cannot have a schedule: clients push its rows, so there is nothing to read "
            "at a due time. Schedule the pushes in the client, or set another source."
        )
    values = {
        "name": new.name,
        "collection_id": collection.id,
        "cron": cron,
        "timezone": new.timezone,
        "overlap": check_overlap(new.overlap),
        "options": to_jsonb(dict(new.options)),
        "next_due_at": next_due(cron, new.timezone, collection.now),
    }
    if connection.execute(INSERT_SCHEDULE, values).one_or_none() is None:
        raise Conflict(f"A schedule named {new.name!r} already exists; change it, or choose another name.")
    return find_schedule(connection, new.name)


_SELECT_SCHEDULE = """
    SELECT schedules.id, schedules.name, schedules.collection_id, collections.name AS collection, schedules.cron,
           schedules.timezone, schedules.overlap, schedules.options, schedules.next_due_at, schedules.paused_at,
           now() AS now
      FROM vectormill.schedules
      JOIN vectormill.collections ON collections.id = schedules.collection_id
"""

LOCK_SCHEDULE = text(f"{_SELECT_SCHEDULE} WHERE schedules.name = :name FOR UPDATE OF schedules")

SAVE_SCHEDULE = text("""
    UPDATE vectormill.schedules
       SET cron = :cron, timezone = :timezone, overlap = :overlap, next_due_at = :next_due_at, paused_at = :paused_at,
           updated_at = now()
     WHERE id = :id
""")


def change_schedule(
    connection: Connection,
    name: str,
    *,
    cron: str | None = None,
    timezone: str | None = None,
    overlap: str | None = None,
) -> Schedule:
    """Change a schedule; fields that are None stay as they are.

    A new expression or time zone applies from now on. Raise ScheduleNotFound or InvalidOption.
    """
    row = lock_schedule(connection, name)
    cron = row.cron if cron is None else check_cron(cron)
    timezone = row.timezone if timezone is None else timezone
    find_timezone(timezone)
    is_same = (cron, timezone) == (row.cron, row.timezone)
    return _save(
        connection,
        row,
        cron=cron,
        timezone=timezone,
        overlap=row.overlap if overlap is None else check_overlap(overlap),
        next_due_at=row.next_due_at if is_same else next_due(cron, timezone, row.now),
    )


def pause_schedule(connection: Connection, name: str) -> Schedule:
    """Pause a schedule: due times create no run until it is resumed; a run that is active continues.

    Raise ScheduleNotFound.
    """
    row = lock_schedule(connection, name)
    return _save(connection, row, paused_at=row.paused_at or row.now)


def resume_schedule(connection: Connection, name: str) -> Schedule:
    """Resume a schedule, which is next due after now: due times missed during the pause stay missed.

    Raise ScheduleNotFound.
    """
    row = lock_schedule(connection, name)
    # A schedule that is not paused keeps its due time, which may be this very moment and must not be lost.
    if row.paused_at is None:
        return find_schedule(connection, name)
    due_at = next_due(row.cron, row.timezone, row.now)
    return _save(connection, row, paused_at=None, next_due_at=due_at)


def _save(connection: Connection, row: Row[Any], **changes: Any) -> Schedule:
    """Write these columns of a locked schedule, and return the schedule."""
    connection.execute(SAVE_SCHEDULE, {**row._mapping, **changes})
    return find_schedule(connection, row.name)


DELETE_SCHEDULE = text("DELETE FROM vectormill.schedules WHERE name = :name RETURNING id")


def delete_schedule(connection: Connection, name: str) -> None:
    """Delete a schedule but not its runs, which then belong to no schedule. Raise ScheduleNotFound."""
    if connection.execute(DELETE_SCHEDULE, {"name": name}).one_or_none() is None:
        raise _not_found(name)


def lock_schedule(connection: Connection, name: str) -> Row[Any]:
    """Lock a schedule until the transaction ends; return its row, with the database's current time.

    Raise ScheduleNotFound.
    """
    row = connection.execute(LOCK_SCHEDULE, {"name": name}).one_or_none()
    if row is None:
        raise _not_found(name)
    return row


def _not_found(name: str) -> ScheduleNotFound:
    return ScheduleNotFound(
        f"There is no schedule {name!r}; `vectormill schedules list` lists all schedules."
    )


# A schedule is failing if its newest run that was neither skipped nor cancelled failed, and overdue if no
# scheduler has handled its due time for a minute.
COUNT_SCHEDULES = text(f"""
    SELECT CAST(count(*) AS integer) AS num_schedules,
           CAST(count(*) FILTER (WHERE paused_at IS NOT NULL) AS integer) AS num_paused,
           CAST(count(*) FILTER (WHERE paused_at IS NULL AND last.state = 'failed') AS integer) AS num_failing,
           CAST(count(*) FILTER (WHERE paused_at IS NULL AND next_due_at < now() - interval '1 minute') AS integer)
               AS num_overdue
      FROM vectormill.schedules
      LEFT JOIN LATERAL (SELECT state FROM vectormill.runs
                          WHERE schedule_id = schedules.id
                            AND state IN {FINISHED_RUN_STATES}
                          ORDER BY created_at DESC LIMIT 1) AS last ON true
""")


def count_schedules(connection: Connection) -> ScheduleCounts:
    """Count all schedules, and those that are paused, failing or overdue."""
    return ScheduleCounts(**connection.execute(COUNT_SCHEDULES).one()._mapping)


# The delay before a schedule is retried whose due times cannot be computed on this machine.
UNREADABLE_PAUSE: Final = timedelta(hours=1)

LIST_DUE_SCHEDULES = text("""
    SELECT id FROM vectormill.schedules
     WHERE paused_at IS NULL AND next_due_at <= now() ORDER BY next_due_at LIMIT 100
""")


def list_due_schedules(connection: Connection) -> Sequence[int]:
    """Return the ids of up to a hundred due schedules, the longest overdue first."""
    return list(connection.execute(LIST_DUE_SCHEDULES).scalars())


@dataclass(frozen=True, slots=True)
class Firing:
    """The outcome of one due time. `reason` says why the run was not queued."""

    schedule: str
    due_at: datetime
    run_id: UUID | None
    state: str
    reason: str | None = None


# Checks again, under the lock, that the schedule is due, because another scheduler may have handled it. SKIP
# LOCKED also skips a schedule whose collection is being deleted: that deletion waits for the schedule's lock,
# so waiting for the collection would be a deadlock.
LOCK_DUE_SCHEDULE = text(f"""{_SELECT_SCHEDULE}
     WHERE schedules.id = :id AND schedules.paused_at IS NULL AND schedules.next_due_at <= now()
       FOR UPDATE OF schedules SKIP LOCKED
       FOR KEY SHARE OF collections SKIP LOCKED
""")

# Finds open runs of any origin, since a run that a client started reads the same source.
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
    """Create the run of a due schedule, in the caller's transaction.

    Return None if another scheduler has handled it or is doing so. If several due times were missed, only the
    newest gets a run, because all would read the same source.
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
    run = create_run(
        connection,
        row.collection,
        REINDEX,
        options=row.options,
        state=state,
        schedule_id=row.id,
        due_at=due_at,
        error=reason,
    )
    connection.execute(MOVE_DUE_TIME, {"id": row.id, "next_due_at": later})
    return Firing(row.name, due_at, None if run is None else run.id, state, reason)


def _decide(connection: Connection, row: Row[Any]) -> tuple[str, str | None]:
    """Return the state of the new run, and the reason if it is not to be carried out."""
    if row.overlap == SKIP:
        other = connection.execute(FIND_OPEN_RUN, {"collection_id": row.collection_id}).one_or_none()
        if other is None:
            return QUEUED, None
        asked = ""
        if other.state == HELD:
            asked = f": `vectormill runs confirm {other.id}` continues it, `vectormill runs cancel {other.id}` ends it"
        return SKIPPED, (
            f"Run {other.id}, created at {describe_moment(other.created_at)}, was still {other.state}{asked}; the "
            "schedule skips overlapping runs."
        )
    other = connection.execute(FIND_QUEUED_RUN, {"schedule_id": row.id}).one_or_none()
    if other is None:
        return QUEUED, None
    # Otherwise a run that hangs for a day would leave a queue of runs that all read the same source.
    return SKIPPED, (
        f"Run {other.id}, created at {describe_moment(other.created_at)}, had not started yet; it will read the source "
        "as it is then."
    )


def run_schedule_now(connection: Connection, name: str) -> UUID:
    """Create a run of a schedule immediately; it is queued after an active run. Raise ScheduleNotFound."""
    row = lock_schedule(connection, name)
    run = create_run(connection, row.collection, REINDEX, options=row.options, schedule_id=row.id)
    assert run is not None  # there is no due time, so no conflict is possible
    return run.id
