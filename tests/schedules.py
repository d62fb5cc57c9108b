"""Collections with a source and a schedule, for tests.

Due times are set in the database, never waited for.
"""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.protocol import make_items, submit
from vectormill.schedules.schedule import NewSchedule, Schedule
from vectormill.schedules.schedules import create_schedule

INSERT_SOURCE = text("""
    INSERT INTO vectormill.sources (collection_id, kind, options)
    SELECT id, :kind, '{}' FROM vectormill.collections WHERE name = :name
""")

SET_DUE = text("""
    UPDATE vectormill.schedules SET next_due_at = now() - CAST(:ago AS interval) WHERE name = :name
    RETURNING next_due_at
""")

LIST_RUNS = text("""
    SELECT runs.* FROM vectormill.runs LEFT JOIN vectormill.schedules ON schedules.id = runs.schedule_id
     WHERE CAST(:name AS text) IS NULL OR schedules.name = CAST(:name AS text) ORDER BY runs.created_at, runs.id
""")


def make_collection(engine: Engine, name: str, kind: str = "sql") -> None:
    """Make a collection with a source that is never read."""
    submit(engine, make_items(1), collection=name)
    add_source(engine, name, kind)


def add_source(engine: Engine, name: str, kind: str = "sql") -> None:
    execute(engine, INSERT_SOURCE, name=name, kind=kind)


def make_schedule(engine: Engine, name: str, cron: str = "0 2 * * *", **given: Any) -> Schedule:
    """Make a schedule for the collection of the same name, or for the one that `collection` names."""
    collection = given.pop("collection", name)
    return ask(engine, create_schedule, NewSchedule(name, collection, cron, **given))


def make_due(engine: Engine, name: str, ago: timedelta = timedelta()) -> datetime:
    """Set the schedule's due time to `ago` before now, as if no scheduler had run since; return that time."""
    with engine.begin() as connection:
        moment: datetime = connection.execute(SET_DUE, {"name": name, "ago": ago}).scalar_one()
        return moment


def list_runs(engine: Engine, name: str | None = None) -> list[Any]:
    return list(execute(engine, LIST_RUNS, name=name))
