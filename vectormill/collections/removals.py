"""Removals: a short transaction removes a collection, and later the pruner drops its tables.

The transaction drops the view and deletes every row that names the collection. A crash before COMMIT changes nothing; a
crash after it leaves orphaned tables, which belong to no generation and which the pruner finds and drops. Jobs that
wrote into the collection stay, but their vectors in it are gone, and their export says so.
"""

from contextlib import suppress
from typing import Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, text

from vectormill.collections.collections import lock_collection
from vectormill.collections.generation_tables import table_name
from vectormill.collections.imports import IMPORTED_PLACE
from vectormill.db.locks import act_in_short_locks, drop_tables
from vectormill.db.session import driver_of
from vectormill.domain.errors import CollectionInUse, CollectionNotFound, Conflict, LocksHeld, NotFound
from vectormill.jobs.job import RECEIVED_JOB_STATES, STEERABLE_JOB_STATES, TERMINAL_JOB_STATES
from vectormill.jobs.jobs import cancel_job
from vectormill.runs.run import CLAIMED_RUN_STATES, STEERABLE_RUN_STATES, UNCLAIMED_RUN_STATES
from vectormill.runs.runs import cancel_run
from vectormill.sources.following import list_followed_tables, remove_triggers

MOST_NAMED: Final = 3

FIND_COLLECTION: Final = text("""
    SELECT collections.id, array_agg(generations.id) AS generation_ids
      FROM vectormill.collections
      JOIN vectormill.generations ON generations.collection_id = collections.id
     WHERE collections.name = :name
     GROUP BY collections.id
""")

# Ended jobs are locked too: a client that retries one waits, and then finds that its collection is gone. An
# upload creates the collection again if it is deleted meanwhile.
LOCK_JOBS: Final = text(f"""
    SELECT id, state FROM vectormill.jobs
     WHERE generation_id = ANY(CAST(:generation_ids AS bigint[]))
       AND (state IN {RECEIVED_JOB_STATES} OR state IN {TERMINAL_JOB_STATES})
     ORDER BY id FOR NO KEY UPDATE NOWAIT
""")

# A run with an expired lease does not count: if its indexer returns, it finds that the run is gone and stops.
LIST_OPEN_RUNS: Final = text(f"""
    SELECT id, state FROM vectormill.runs
     WHERE collection_id = :collection_id
       AND (state IN {UNCLAIMED_RUN_STATES} OR state IN {CLAIMED_RUN_STATES} AND lease_until > now())
     ORDER BY id
""")

LIST_STEERABLE_RUNS: Final = text(f"""
    SELECT run.id FROM vectormill.runs AS run
      JOIN vectormill.collections ON collections.id = run.collection_id
     WHERE collections.name = :name AND run.state IN {STEERABLE_RUN_STATES}
     ORDER BY run.created_at
""")

LIST_OPEN_JOBS: Final = text(f"""
    SELECT job.id FROM vectormill.jobs AS job
      JOIN vectormill.generations ON generations.id = job.generation_id
      JOIN vectormill.collections ON collections.id = generations.collection_id
     WHERE collections.name = :name AND job.state IN {STEERABLE_JOB_STATES}
     ORDER BY job.seq
""")

# These are users' views on the collection's view or tables. Other dependent objects are named by Postgres itself when
# it refuses to drop the view.
LIST_DEPENDENTS: Final = text("""
    SELECT DISTINCT CAST(CAST(rule.ev_class AS regclass) AS text) AS name
      FROM pg_depend AS link
      JOIN pg_rewrite AS rule ON link.classid = CAST('pg_rewrite' AS regclass) AND link.objid = rule.oid
     WHERE link.refclassid = CAST('pg_class' AS regclass)
       AND link.refobjid IN (SELECT to_regclass(name) FROM unnest(CAST(:relations AS text[])) AS name)
       AND rule.ev_class <> ALL(SELECT coalesce(to_regclass(name), 0) FROM unnest(CAST(:relations AS text[])) AS name)
     ORDER BY name
""")

# The tables that the collection's view reads.
LIST_TABLES_OF_VIEW: Final = text("""
    SELECT DISTINCT class.relname
      FROM pg_depend AS link
      JOIN pg_rewrite AS rule ON link.classid = CAST('pg_rewrite' AS regclass) AND link.objid = rule.oid
      JOIN pg_class AS view ON view.oid = rule.ev_class AND view.relkind = 'v'
      JOIN pg_class AS class ON class.oid = link.refobjid AND class.relkind = 'r'
     WHERE view.oid = to_regclass(:view) AND link.refclassid = CAST('pg_class' AS regclass)
     ORDER BY class.relname
""")

# The last column counts sources and schedules.
COUNT_ROWS: Final = """
    SELECT count(*), count(*) FILTER (WHERE job_seq = :place),
           (SELECT count(*) FROM vectormill.sources WHERE collection_id = :collection_id)
           + (SELECT count(*) FROM vectormill.schedules WHERE collection_id = :collection_id)
      FROM vectormill.{table}
"""

DELETE_COLLECTION: Final = text("DELETE FROM vectormill.collections WHERE id = :collection_id")


def stop_work(engine: Engine, name: str) -> None:
    """Cancel every open job and run of a collection. Workers and indexers stop working on them within seconds."""
    for listed, cancel in ((LIST_STEERABLE_RUNS, cancel_run), (LIST_OPEN_JOBS, cancel_job)):
        with engine.connect() as connection:
            ids = list(connection.execute(listed, {"name": name}).scalars())
        for each in ids:
            # It may have ended meanwhile.
            with suppress(NotFound, Conflict), engine.begin() as connection:
                cancel(connection, each)


def remove_collection(engine: Engine, name: str, *, num_imported: int | None = None) -> None:
    """Remove a collection; if `num_imported` is given, only one that has so many imported rows and nothing else.

    Raise CollectionNotFound, or CollectionInUse, which names the jobs, runs, views or rows in use.
    """
    try:
        act_in_short_locks(
            engine, lambda connection: _remove(connection, name, num_imported), patience_seconds=0
        )
    except LocksHeld as error:
        raise CollectionInUse(
            f"Collection {name!r} is being read or written, so it cannot be deleted now; try again in a moment.",
            is_passing=True,
        ) from error


def _remove(connection: Connection, name: str, num_imported: int | None) -> None:
    lock_collection(connection, name)
    found = connection.execute(FIND_COLLECTION, {"name": name}).one_or_none()
    if found is None:
        raise CollectionNotFound.named(name)
    _refuse_open_work(connection, name, found.id, found.generation_ids)
    if num_imported is not None:
        _refuse_more(connection, name, found.id, found.generation_ids, num_imported)
    view = f"public.{name}"
    tables = [
        f"vectormill.generation_{generation_id}{suffix}"
        for generation_id in found.generation_ids
        for suffix in ("", "_attributes")
    ]
    dependents = list(connection.execute(LIST_DEPENDENTS, {"relations": [view, *tables]}).scalars())
    if dependents:
        raise _depended_on(name, ", ".join(dependents))
    # Somebody may have replaced the collection's view by another, which stays.
    read = connection.execute(LIST_TABLES_OF_VIEW, {"view": view}).scalars()
    if any(f"vectormill.{table}" in tables for table in read):
        _drop_view(connection, name)
    remove_triggers(connection, found.id)
    connection.execute(DELETE_COLLECTION, {"collection_id": found.id})


def _drop_view(connection: Connection, name: str) -> None:
    try:
        driver_of(connection).execute(sql.SQL("DROP VIEW {}").format(sql.Identifier("public", name)))
    except psycopg.errors.DependentObjectsStillExist as error:
        raise _depended_on(
            name, (error.diag.message_detail or "other objects").replace("\n", "; ")
        ) from error


def _depended_on(name: str, what: str) -> CollectionInUse:
    return CollectionInUse(
        f"Other objects of this database depend on the view {name!r} or its tables and would be dropped too: {what}. "
        "Drop them first. Nothing was deleted."
    )


def _refuse_open_work(
    connection: Connection, name: str, collection_id: int, generation_ids: list[int]
) -> None:
    jobs = connection.execute(LOCK_JOBS, {"generation_ids": generation_ids}).all()
    runs = connection.execute(LIST_OPEN_RUNS, {"collection_id": collection_id}).all()
    open_jobs = [("job", job) for job in jobs if job.state not in TERMINAL_JOB_STATES]
    open_work = open_jobs + [("run", run) for run in runs]
    if open_work:
        named = ", ".join(f"{noun} {work.id} ({work.state})" for noun, work in open_work[:MOST_NAMED])
        more = f" and {len(open_work) - MOST_NAMED} more" if len(open_work) > MOST_NAMED else ""
        raise CollectionInUse(
            f"Collection {name!r} is in use by {named}{more}. Cancel these, or delete it with `force`, which does so.",
            is_passing=all(work.state == "cancelling" for _, work in open_work),
        )


def _refuse_more(
    connection: Connection, name: str, collection_id: int, generation_ids: list[int], num_imported: int
) -> None:
    statement = text(COUNT_ROWS.format(table=table_name(generation_ids[0])))
    values = {"place": IMPORTED_PLACE, "collection_id": collection_id}
    counts = tuple(connection.execute(statement, values).one())
    is_used = counts != (num_imported, num_imported, 0) or list_followed_tables(connection, collection_id)
    if len(generation_ids) > 1 or is_used:
        raise CollectionInUse(
            f"Collection {name!r} has rows of other writers, a source, a schedule or a followed table."
        )


# A table whose generation does not exist is orphaned for good: both are created in one transaction, and ids are never
# reused.
LIST_ORPHANS: Final = text("""
    SELECT relname FROM pg_class
     WHERE relnamespace = CAST('vectormill' AS regnamespace) AND relkind = 'r'
       AND relname ~ '^generation_[0-9]+(_fill)?(_attributes)?$'
       AND NOT EXISTS (SELECT 1 FROM vectormill.generations
                        WHERE id = CAST(substring(relname FROM '[0-9]+') AS bigint))
     ORDER BY relname
""")


def drop_orphaned_tables(engine: Engine) -> int:
    """Drop the tables of generations that no longer exist, and return their number."""
    return drop_tables(engine, LIST_ORPHANS)
