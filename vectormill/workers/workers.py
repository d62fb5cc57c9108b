"""Live workers and schedulers, found by their heartbeats on the database's clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.db.parameters import to_jsonb
from vectormill.settings import ALIVE_SECONDS as ALIVE_SECONDS

# The names of heartbeats in their table. Two of them report why the scheduler cannot dispatch.
SCHEDULER: Final = "scheduler"
REDIS_AWAY: Final = "redis away"
REDIS_FULL: Final = "redis full"
INDEXER: Final = "indexer"

# The SQL condition of a row of a live worker.
IS_ALIVE: Final = f"heartbeat_at > now() - make_interval(secs => {ALIVE_SECONDS})"


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker; `report` says what it runs on and why."""

    name: str
    incarnation: UUID
    model: str
    slots: int
    report: dict[str, Any]
    started_at: datetime
    heartbeat_at: datetime


def name_owner(name: str, incarnation: UUID) -> str:
    """Return the name under which a worker owns leases.

    Its last eight letters identify the incarnation, that is the process; SQL relies on this too (LIST_ROOMS).
    """
    return f"{name}#{incarnation.hex[:8]}"


# A live worker's row cannot be taken over, except by the next worker of the same launcher.
BEAT = text("""
    INSERT INTO vectormill.workers (name, incarnation, launcher, model, slots, max_tokens_in_flight, report)
    VALUES (:name, :incarnation, :launcher, :model, :slots, CAST(:max_tokens_in_flight AS integer),
            CAST(:report AS jsonb))
    ON CONFLICT (name) DO UPDATE
       SET heartbeat_at = now(), incarnation = excluded.incarnation, launcher = excluded.launcher,
           model = excluded.model, slots = excluded.slots, max_tokens_in_flight = excluded.max_tokens_in_flight,
           report = excluded.report,
           started_at = CASE WHEN workers.incarnation = excluded.incarnation THEN workers.started_at ELSE now() END
     WHERE workers.incarnation = excluded.incarnation OR workers.launcher = excluded.launcher
        OR workers.heartbeat_at <= now() - make_interval(secs => :alive_seconds)
    RETURNING name
""")


def beat_worker(
    connection: Connection,
    name: str,
    incarnation: UUID,
    model: str,
    slots: int,
    report: Mapping[str, Any],
    launcher: UUID | None = None,
) -> bool:
    """Record a worker's heartbeat; the first one registers the worker.

    Return False if another live worker has this name. `max_tokens_in_flight` is copied from the report to a
    column, because the dispatcher reads it ten times a second.
    """
    values = {
        "name": name,
        "incarnation": incarnation,
        "launcher": launcher,
        "model": model,
        "slots": slots,
        "max_tokens_in_flight": report.get("max_tokens_in_flight"),
        "report": to_jsonb(report),
        "alive_seconds": ALIVE_SECONDS,
    }
    return connection.execute(BEAT, values).one_or_none() is not None


def find_last_beats(connection: Connection, names: Sequence[str]) -> dict[str, datetime]:
    """Return the time of the last heartbeat of each named worker; unknown names are left out."""
    statement = text(
        "SELECT name, heartbeat_at FROM vectormill.workers WHERE name = ANY(CAST(:names AS text[]))"
    )
    return {row.name: row.heartbeat_at for row in connection.execute(statement, {"names": list(names)})}


def delete_worker(connection: Connection, name: str, incarnation: UUID) -> None:
    """Delete the row of a worker that shuts down, unless another incarnation has taken over its name."""
    connection.execute(
        text("DELETE FROM vectormill.workers WHERE name = :name AND incarnation = :incarnation"),
        {"name": name, "incarnation": incarnation},
    )


LIST_WORKERS = text(f"""
    SELECT name, incarnation, model, slots, report, started_at, heartbeat_at FROM vectormill.workers
     WHERE {IS_ALIVE} AND (CAST(:name AS text) IS NULL OR name = :name)
     ORDER BY name LIMIT 10000
""")


def list_workers(connection: Connection, name: str | None = None) -> list[Worker]:
    """List the live workers by name, or only the one with this name."""
    rows = connection.execute(LIST_WORKERS, {"name": name})
    return [Worker(*row) for row in rows]


def find_worker(connection: Connection, name: str) -> Worker | None:
    """Return the live worker with this name; None if there is none."""
    return next(iter(list_workers(connection, name)), None)


# The workers of one launcher and model carry out one plan.
LIST_PLAN_PARTS = text(f"""
    SELECT mate.name, mate.report -> 'placement' AS part
      FROM vectormill.workers AS own
      JOIN vectormill.workers AS mate
        ON mate.name = own.name OR (mate.launcher = own.launcher AND mate.model = own.model)
     WHERE own.name = :name AND mate.{IS_ALIVE}
       AND jsonb_typeof(mate.report -> 'placement') = 'object'
     ORDER BY mate.name LIMIT 1000
""")


def list_plan_parts(connection: Connection, name: str) -> dict[str, dict[str, Any]]:
    """Return by worker name what each live worker reports of the plan that it shares with the named worker."""
    rows = connection.execute(LIST_PLAN_PARTS, {"name": name})
    return {row.name: row.part for row in rows}


# A worker that cannot load its model has no slots.
COUNT_WORKERS = text(f"""
    SELECT model, count(*) AS num_workers FROM vectormill.workers
     WHERE {IS_ALIVE} AND slots > 0 GROUP BY model
""")

COUNT_FAILING_WORKERS = text(f"SELECT count(*) FROM vectormill.workers WHERE {IS_ALIVE} AND slots = 0")


def count_workers(connection: Connection) -> dict[str, int]:
    """Return by model the number of live workers that can load it.

    The reports, of kilobytes each, are not read.
    """
    return {row.model: row.num_workers for row in connection.execute(COUNT_WORKERS)}


def count_failing_workers(connection: Connection) -> int:
    """Return the number of live workers that cannot load their model."""
    return int(connection.execute(COUNT_FAILING_WORKERS).scalar_one())


BEAT_DUTY = text("""
    INSERT INTO vectormill.heartbeats (duty) VALUES (:duty) ON CONFLICT (duty) DO UPDATE SET beat_at = now()
""")


def beat_scheduler(
    connection: Connection, *, is_redis_away: bool = False, is_redis_full: bool = False
) -> None:
    """Record the scheduler's heartbeat, and whether Redis is unreachable or full."""
    connection.execute(BEAT_DUTY, {"duty": SCHEDULER})
    for duty, is_so in ((REDIS_AWAY, is_redis_away), (REDIS_FULL, is_redis_full)):
        if is_so:
            connection.execute(BEAT_DUTY, {"duty": duty})
        else:
            connection.execute(text("DELETE FROM vectormill.heartbeats WHERE duty = :duty"), {"duty": duty})


def beat_indexer(connection: Connection) -> None:
    """Record the heartbeat of an indexer; all indexers share one."""
    connection.execute(BEAT_DUTY, {"duty": INDEXER})


LIST_SIGNS_OF_LIFE = text("""
    SELECT duty FROM vectormill.heartbeats WHERE beat_at > now() - make_interval(secs => :alive_seconds)
""")


def list_signs_of_life(connection: Connection) -> set[str]:
    """Return the recent heartbeats among SCHEDULER, REDIS_AWAY, REDIS_FULL and INDEXER."""
    return set(connection.execute(LIST_SIGNS_OF_LIFE, {"alive_seconds": ALIVE_SECONDS}).scalars())


def is_scheduler_alive(connection: Connection) -> bool:
    """Return whether a scheduler has sent a heartbeat lately."""
    return SCHEDULER in list_signs_of_life(connection)
