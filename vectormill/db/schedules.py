"""Schedules as rows: made, changed, paused, looked at. What makes their runs: due_times.py."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, text

from vectormill.cron import check_cron, find_timezone, next_due
from vectormill.db.jsonb import to_jsonb
from vectormill.domain.errors import (
    CollectionNotFound,
    Conflict,
    InvalidOption,
    ScheduleNotFound,
    SourceNotFound,
)
from vectormill.domain.schedule import NewSchedule, Schedule, check_overlap, check_schedule_name
from vectormill.domain.source import PUSH

# The counts read the runs of one schedule since its last success, by the index of (schedule_id, due_at).
SCHEDULES_WITH_RUNS = """
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
                          WHERE schedule_id = schedules.id AND state IN ('completed', 'completed_with_errors')
                          ORDER BY created_at DESC LIMIT 1) AS success ON true
     CROSS JOIN LATERAL (SELECT CAST(count(*) FILTER (WHERE state = 'failed') AS integer) AS num_failures,
                                CAST(count(*) FILTER (WHERE state = 'skipped') AS integer) AS num_skipped,
                                (array_agg(error ORDER BY created_at DESC))[1] AS last_error
                           FROM vectormill.runs
                          WHERE schedule_id = schedules.id AND state IN ('failed', 'skipped')
                            AND (success.created_at IS NULL OR created_at > success.created_at)) AS since
"""

FIND_SCHEDULE = text(f"{SCHEDULES_WITH_RUNS} WHERE schedules.name = :name")

LIST_SCHEDULES = text(f"""{SCHEDULES_WITH_RUNS}
     WHERE (CAST(:after AS text) IS NULL OR schedules.name > CAST(:after AS text))
       AND (CAST(:collection AS text) IS NULL OR collections.name = CAST(:collection AS text))
     ORDER BY schedules.name
     LIMIT CAST(:limit AS integer)
""")


def find_schedule(connection: Connection, name: str) -> Schedule:
    """Raises ScheduleNotFound."""
    row = connection.execute(FIND_SCHEDULE, {"name": name}).one_or_none()
    if row is None:
        raise _not_found(name)
    return _schedule(row)


def list_schedules(
    connection: Connection, *, collection: str | None = None, after: str | None = None, limit: int = 200
) -> Sequence[Schedule]:
    """By name; `after` is the last one that is known already."""
    values = {"collection": collection, "after": after, "limit": limit}
    return [_schedule(row) for row in connection.execute(LIST_SCHEDULES, values)]


# Locks the collection against deletion until the schedule is there.
FIND_COLLECTION_AND_SOURCE = text("""
    SELECT collections.id, sources.kind, now() AS now
      FROM vectormill.collections
      LEFT JOIN vectormill.sources ON sources.collection_id = collections.id
     WHERE collections.name = :name
       FOR KEY SHARE OF collections
""")

INSERT_SCHEDULE = text("""
    INSERT INTO vectormill.schedules (name, collection_id, cron, timezone, overlap, options, next_due_at)
    VALUES (:name, :collection_id, :cron, :timezone, :overlap, CAST(:options AS jsonb), :next_due_at)
    ON CONFLICT (name) DO NOTHING
    RETURNING name
""")


def create_schedule(connection: Connection, new: NewSchedule) -> Schedule:
    """The schedule, first due after now on the database's clock.

    Raises InvalidOption, CollectionNotFound, SourceNotFound, and Conflict when the name is taken.
    """
    check_schedule_name(new.name)
    cron = check_cron(new.cron)
    collection = connection.execute(FIND_COLLECTION_AND_SOURCE, {"name": new.collection}).one_or_none()
    if collection is None:
        raise CollectionNotFound(f"There is no collection {new.collection!r} that could be re-indexed.")
    if collection.kind is None:
        raise SourceNotFound
    if collection.kind == PUSH:
        raise InvalidOption(
            f"The source of collection {new.collection!r} is one that clients push to; nothing could be read at a due "
            "time. Let the client that pushes keep the time, or set another source."
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
        raise Conflict(f"There is a schedule named {new.name!r} already; change that, or take another name.")
    return find_schedule(connection, new.name)


LOCK_SCHEDULE = text("""
    SELECT id, collection_id, cron, timezone, overlap, options, paused_at, now() AS now
      FROM vectormill.schedules WHERE name = :name FOR UPDATE
""")

CHANGE_SCHEDULE = text("""
    UPDATE vectormill.schedules
       SET cron = :cron, timezone = :timezone, overlap = :overlap, options = CAST(:options AS jsonb),
           next_due_at = coalesce(CAST(:next_due_at AS timestamptz), next_due_at), updated_at = now()
     WHERE id = :id
""")


def change_schedule(
    connection: Connection,
    name: str,
    *,
    cron: str | None = None,
    timezone: str | None = None,
    overlap: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """What is None stays. Another expression or zone is due after now. Raises ScheduleNotFound and InvalidOption."""
    row = lock_schedule(connection, name)
    values: dict[str, Any] = {
        "id": row.id,
        "cron": row.cron if cron is None else check_cron(cron),
        "timezone": row.timezone if timezone is None else timezone,
        "overlap": row.overlap if overlap is None else check_overlap(overlap),
        "options": to_jsonb(row.options if options is None else dict(options)),
        "next_due_at": None,
    }
    find_timezone(values["timezone"])
    if (values["cron"], values["timezone"]) != (row.cron, row.timezone):
        values["next_due_at"] = next_due(values["cron"], values["timezone"], row.now)
    connection.execute(CHANGE_SCHEDULE, values)
    return find_schedule(connection, name)


PAUSE_SCHEDULE = text("""
    UPDATE vectormill.schedules SET paused_at = coalesce(paused_at, now()), updated_at = now() WHERE name = :name
    RETURNING id
""")


def pause_schedule(connection: Connection, name: str) -> Schedule:
    """No due time makes a run until it is resumed; a run that goes on is left alone. Raises ScheduleNotFound."""
    if connection.execute(PAUSE_SCHEDULE, {"name": name}).one_or_none() is None:
        raise _not_found(name)
    return find_schedule(connection, name)


RESUME_SCHEDULE = text("""
    UPDATE vectormill.schedules SET paused_at = NULL, next_due_at = :next_due_at, updated_at = now() WHERE id = :id
""")


def resume_schedule(connection: Connection, name: str) -> Schedule:
    """It is due again after now: what was missed in the pause stays missed. Raises ScheduleNotFound."""
    row = lock_schedule(connection, name)
    # One that was not paused may be due this very moment, and that time is not to be lost.
    if row.paused_at is not None:
        values = {"id": row.id, "next_due_at": next_due(row.cron, row.timezone, row.now)}
        connection.execute(RESUME_SCHEDULE, values)
    return find_schedule(connection, name)


DELETE_SCHEDULE = text("DELETE FROM vectormill.schedules WHERE name = :name RETURNING id")


def delete_schedule(connection: Connection, name: str) -> None:
    """Its runs stay, without it. Raises ScheduleNotFound."""
    if connection.execute(DELETE_SCHEDULE, {"name": name}).one_or_none() is None:
        raise _not_found(name)


def lock_schedule(connection: Connection, name: str) -> Row[Any]:
    """The row, and the database's time. Raises ScheduleNotFound."""
    row = connection.execute(LOCK_SCHEDULE, {"name": name}).one_or_none()
    if row is None:
        raise _not_found(name)
    return row


def describe_moment(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _not_found(name: str) -> ScheduleNotFound:
    return ScheduleNotFound(f"There is no schedule {name!r}; `vectormill schedules list` has all.")


def _schedule(row: Row[Any]) -> Schedule:
    return Schedule(**row._mapping)
