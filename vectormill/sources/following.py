"""Following tables: triggers on a user's table record changed keys in the transaction that changes them.

The triggers in the catalog are the only record that a table is followed. Ids of changes are drawn before
their transactions commit, so a smaller id can become visible after a larger one; therefore no high-water mark
is kept. Changes are deleted by id in the transaction that makes their effect durable, and a follower that
finds one already deleted rolls back.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.pq.abc import PGresult
from sqlalchemy import Connection, Row, text
from sqlalchemy.exc import DBAPIError

from vectormill.collections.collections import find_written, list_written_generations
from vectormill.collections.generation_tables import table_name
from vectormill.collections.items import remove_items
from vectormill.db.session import driver_of, walk_plan
from vectormill.domain.errors import CollectionNotFound, Conflict, InvalidOption, SourceNotFound
from vectormill.jobs.job import TENDED_JOB_STATES
from vectormill.runs.differences import list_failed_keys
from vectormill.sources.operations import FollowingBody
from vectormill.sources.source import Source
from vectormill.sources.sources import FIND_SOURCE_BY_ID, LOCK_SOURCE, read_source
from vectormill.sources.sql import ask_for, open_own

# The key that stands for the whole table (TRUNCATE); no item has an empty key.
WHOLE_TABLE: Final = ""

# Skips from collection to collection through the index, so that the cost depends on the number of collections
# and not on that of changes.
LIST_CHANGED_COLLECTIONS = text("""
    WITH RECURSIVE changed (id) AS (
        (SELECT collection_id FROM vectormill.source_changes ORDER BY collection_id LIMIT 1)
        UNION ALL
        SELECT (SELECT collection_id FROM vectormill.source_changes
                 WHERE collection_id > changed.id ORDER BY collection_id LIMIT 1)
          FROM changed WHERE changed.id IS NOT NULL
    )
    SELECT id FROM changed WHERE id IS NOT NULL
""")


def list_changed_collections(connection: Connection) -> Sequence[int]:
    """Return the ids of collections with pending changes, including collections that were deleted since."""
    return list(connection.execute(LIST_CHANGED_COLLECTIONS).scalars())


@dataclass(frozen=True, slots=True)
class FollowedCollection:
    """A collection and its source. `is_busy` means that a recent job of earlier changes is still open."""

    id: int
    name: str
    source: Source | None
    is_busy: bool


# Looks for an open job of earlier changes. One job at a time keeps the order: later reads are written later,
# and rows to compare with are already there. A job that has been open for longer than the limit waits for
# workers or a retry, and no longer holds up the changes after it.
IS_BUSY = text(f"""
    SELECT EXISTS (SELECT 1 FROM vectormill.jobs
                    WHERE state IN {TENDED_JOB_STATES}
                      AND created_at > now() - make_interval(secs => CAST(:patience_seconds AS double precision))
                      AND metadata ? 'changes_of' AND metadata ->> 'changes_of' = :collection)
""")


def find_followed_collection(
    connection: Connection, collection_id: int, patience_seconds: float
) -> FollowedCollection | None:
    """Return a collection and its source; None if the collection does not exist."""
    row = connection.execute(FIND_SOURCE_BY_ID, {"collection_id": collection_id}).one_or_none()
    if row is None:
        return None
    values = {"collection": row.name, "patience_seconds": patience_seconds}
    is_busy = connection.execute(IS_BUSY, values).scalar_one()
    return FollowedCollection(row.id, row.name, read_source(row), is_busy)


# The seed 17 keeps this lock apart from the locks of the collection's name and of its deletions.
TRY_TO_FOLLOW = text("""
    SELECT pg_try_advisory_xact_lock(hashtextextended(CAST(CAST(:collection_id AS bigint) AS text), 17))
""")


def try_to_follow(connection: Connection, collection_id: int) -> bool:
    """Take a collection's follower lock until the transaction ends; return False if it is taken.

    The lock only avoids double work; correctness does not depend on it.
    """
    is_ours: bool = connection.execute(TRY_TO_FOLLOW, {"collection_id": collection_id}).scalar_one()
    return is_ours


@dataclass(frozen=True, slots=True)
class Changes:
    """Some recorded changes of one collection.

    `ids` are the ids of all of them, and `keys` their distinct keys without WHOLE_TABLE. `is_whole` is True if
    WHOLE_TABLE is among the keys.
    """

    ids: Sequence[int]
    keys: Sequence[str]
    is_whole: bool


LIST_CHANGES = text("""
    SELECT id, key FROM vectormill.source_changes WHERE collection_id = :collection_id ORDER BY id LIMIT :limit
""")


def list_changes(connection: Connection, collection_id: int, *, max_keys: int, limit: int) -> Changes:
    """Return the oldest `limit` changes, restricted to the first `max_keys` distinct keys."""
    ids: list[int] = []
    keys: set[str] = set()
    is_whole = False
    for row in connection.execute(LIST_CHANGES, {"collection_id": collection_id, "limit": limit}):
        if row.key == WHOLE_TABLE:
            is_whole = True
        elif row.key not in keys and len(keys) >= max_keys:
            continue
        else:
            keys.add(row.key)
        ids.append(row.id)
    return Changes(ids, sorted(keys), is_whole)


REMOVE_CHANGES = text("DELETE FROM vectormill.source_changes WHERE id = ANY(CAST(:ids AS bigint[]))")


def remove_changes(connection: Connection, ids: Sequence[int]) -> None:
    """Delete changes in the transaction that makes their effect durable. Raise Conflict if one is gone."""
    if connection.execute(REMOVE_CHANGES, {"ids": list(ids)}).rowcount != len(ids):
        raise Conflict("Another follower has already handled these changes.")


REMOVE_CHANGES_OF_COLLECTION = text("""
    DELETE FROM vectormill.source_changes WHERE collection_id = :collection_id
""")


def forget_changes(connection: Connection, collection_id: int) -> int:
    """Delete all changes of a collection that no longer follows a table; return their number."""
    return connection.execute(REMOVE_CHANGES_OF_COLLECTION, {"collection_id": collection_id}).rowcount


NOTE_KEYS = text("""
    INSERT INTO vectormill.source_changes (collection_id, key)
    SELECT :collection_id, key FROM unnest(CAST(:keys AS text[])) AS key
""")


NOTE_EVERY_KEY: Final = """
    INSERT INTO vectormill.source_changes (collection_id, key)
    SELECT DISTINCT :collection_id, coalesce(kept.document, live.key)
      FROM vectormill.{table} AS live LEFT JOIN vectormill.{table}_attributes AS kept ON kept.key = live.key
"""


def expand_truncation(connection: Connection, collection: FollowedCollection, changes: Changes) -> None:
    """Replace the changes of a truncated table by one for each document of the collection, as any may be gone."""
    remove_changes(connection, changes.ids)
    for generation in list_written_generations(connection, collection.name):
        statement = text(NOTE_EVERY_KEY.format(table=table_name(generation.id)))
        connection.execute(statement, {"collection_id": generation.collection_id})
    # The changes of single keys were removed too, but have not been processed yet.
    connection.execute(NOTE_KEYS, {"collection_id": collection.id, "keys": list(changes.keys)})


LIST_PASSAGES: Final = """
    SELECT key FROM vectormill.{table}_attributes WHERE document = ANY(CAST(:documents AS text[]))
"""


def list_passages(connection: Connection, collection: str, documents: Sequence[str]) -> set[str]:
    """Return the keys of the passages of these documents, in the live generation and in one being built."""
    keys: set[str] = set()
    for generation in list_written_generations(connection, collection):
        statement = text(LIST_PASSAGES.format(table=table_name(generation.id)))
        keys.update(connection.execute(statement, {"documents": list(documents)}).scalars())
    return keys


LIST_FAILED_JOBS = text("""
    SELECT id, generation_id FROM vectormill.jobs
     WHERE forget_at = 'infinity' AND finished_at IS NOT NULL AND num_failed > 0 AND metadata ? 'changes_of'
       AND state <> 'deleting'
     ORDER BY seq LIMIT 20
""")

KEEP_FAILED_JOB = text("""
    UPDATE vectormill.jobs SET forget_at = NULL, updated_at = now()
     WHERE id = :job_id AND forget_at = 'infinity' AND finished_at IS NOT NULL
""")


@dataclass(frozen=True, slots=True)
class FailedJob:
    """An ended job of changes in which some texts could not be encoded."""

    id: UUID
    generation_id: int


def list_failed_jobs(connection: Connection) -> Sequence[FailedJob]:
    """Return up to 20 jobs of changes with failed items whose previous rows still exist, the oldest first."""
    return [FailedJob(row.id, row.generation_id) for row in connection.execute(LIST_FAILED_JOBS)]


def remove_failed(connection: Connection, job: FailedJob) -> int:
    """Delete the previous rows of keys whose new text could not be encoded; return their number.

    From then on the job is retained like any other, so that its errors can be read and it can be retried.
    """
    number, after = 0, -1
    # If the generation was dropped, no row of it is read any more.
    with suppress(Conflict):
        generation = find_written(connection, job.generation_id)
        while failed := list_failed_keys(connection, job.id, after=after, limit=1000):
            keys, places = [key for _, key, _ in failed], [place for _, _, place in failed]
            number += remove_items(connection, generation, keys, places)
            after = failed[-1][0]
    connection.execute(KEEP_FAILED_JOB, {"job_id": job.id})
    return number


EVENTS: Final = {
    "insert": "INSERT ON {table} REFERENCING NEW TABLE AS new_rows",
    "update": "UPDATE ON {table} REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows",
    "delete": "DELETE ON {table} REFERENCING OLD TABLE AS old_rows",
    "truncate": "TRUNCATE ON {table}",
}
# The cost of a trigger for each statement does not grow with the statement's rows.
CREATE_TRIGGER: Final = """
    CREATE OR REPLACE TRIGGER {trigger} AFTER {clause} FOR EACH STATEMENT
    EXECUTE FUNCTION vectormill.note_changes({collection}, {column})
"""


@dataclass(frozen=True, slots=True)
class FollowedTable:
    """A table that a collection follows.

    `key_column` holds the keys of the collection's items, or of its documents if the source is split.
    """

    schema: str
    name: str
    key_column: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"

    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)


def follow_table(
    connection: Connection,
    collection: str,
    *,
    table: str | None = None,
    key_column: str | None = None,
    reader_url: str | None = None,
) -> FollowedTable:
    """Create the triggers that record changes of a table, from COMMIT on.

    Without names, table and column are found from the source's query, which is planned as the reader. Call with short
    lock timeouts: CREATE TRIGGER waits for transactions that write to the table, and blocks later ones. Raise
    CollectionNotFound, SourceNotFound, InvalidOption or Conflict.
    """
    row = _lock_source(connection, collection)
    collection_id, source = row.id, read_source(row)
    if source is None:
        raise SourceNotFound
    if not source.is_own_query:
        raise InvalidOption(
            f"Collection {collection!r} cannot follow a table: triggers need a source that queries Vectormill's own "
            "Postgres. Use a schedule instead."
        )
    found = find_key_table(connection, source, table, key_column, reader_url)
    others = [other for other in list_followed_tables(connection, collection_id) if other != found]
    if others:
        raise Conflict(f"Collection {collection!r} already follows {others[0]}; unfollow that table first.")
    try:
        for event, clause in EVENTS.items():
            statement = sql.SQL(CREATE_TRIGGER).format(
                trigger=sql.Identifier(trigger_name(collection_id, event)),
                clause=sql.SQL(clause).format(table=found.identifier()),
                collection=sql.Literal(str(collection_id)),
                column=sql.Literal(found.key_column),
            )
            driver_of(connection).execute(statement)
    except psycopg.errors.InsufficientPrivilege as error:
        raise Conflict(
            f"Vectormill's role may not create triggers on {found}; its owner must run: GRANT TRIGGER ON {found} TO "
            "that role."
        ) from error
    return found


def trigger_name(collection_id: int, event: str) -> str:
    return f"vectormill_follow_{collection_id}_{event}"


def unfollow_table(connection: Connection, collection: str) -> Sequence[FollowedTable]:
    """Drop a collection's triggers and delete its changes; return the tables that had triggers.

    Call with short lock timeouts. Raise CollectionNotFound, or Conflict if only the table's owner can drop a
    trigger.
    """
    return remove_triggers(connection, _lock_source(connection, collection).id)


def remove_triggers(connection: Connection, collection_id: int) -> Sequence[FollowedTable]:
    """Drop the triggers of a collection, which may be deleted in the same transaction; return its tables."""
    found = list_followed_tables(connection, collection_id)
    for table in found:
        drops = [
            sql.SQL("DROP TRIGGER IF EXISTS {} ON {}").format(
                sql.Identifier(trigger_name(collection_id, event)), table.identifier()
            )
            for event in EVENTS
        ]
        try:
            for drop in drops:
                driver_of(connection).execute(drop)
        except psycopg.errors.InsufficientPrivilege as error:
            said = "; ".join(drop.as_string(None) for drop in drops)
            raise Conflict(
                f"Only the owner of {table} can remove its triggers, by running: {said}."
            ) from error
    forget_changes(connection, collection_id)
    return found


LIST_FOLLOWED_TABLES = text("""
    SELECT pg_namespace.nspname AS schema, pg_class.relname AS name, pg_trigger.tgargs AS arguments
      FROM pg_trigger
      JOIN pg_class ON pg_class.oid = pg_trigger.tgrelid
      JOIN pg_namespace ON pg_namespace.oid = pg_class.relnamespace
     WHERE pg_trigger.tgname = :trigger AND pg_trigger.tgparentid = 0
     ORDER BY 1, 2
""")


def list_followed_tables(connection: Connection, collection_id: int) -> list[FollowedTable]:
    """Return the tables that a collection follows: at most one, unless triggers were copied by hand."""
    values = {"trigger": trigger_name(collection_id, "insert")}
    return [
        FollowedTable(row.schema, row.name, bytes(row.arguments).split(b"\0")[1].decode())
        for row in connection.execute(LIST_FOLLOWED_TABLES, values)
    ]


COUNT_WAITING = text("""
    SELECT CAST(count(*) AS integer) AS num_waiting, min(changed_at) AS oldest_at,
           coalesce(extract(epoch FROM now() - min(changed_at)), 0)::float8 AS oldest_seconds
      FROM (SELECT changed_at FROM vectormill.source_changes
             WHERE collection_id = :collection_id ORDER BY collection_id, id LIMIT :limit) AS waiting
""")


def describe_following(connection: Connection, collection: str) -> FollowingBody:
    """Return the table that a collection follows, and its backlog. Raise CollectionNotFound."""
    row = _lock_source(connection, collection)
    table = next(iter(list_followed_tables(connection, row.id)), None)
    waiting = connection.execute(COUNT_WAITING, {"collection_id": row.id, "limit": 1000}).one()
    return FollowingBody(
        collection=collection,
        table=None if table is None else str(table),
        key_column=None if table is None else table.key_column,
        waiting_changes=waiting.num_waiting,
        lag_seconds=waiting.oldest_seconds,
    )


def _lock_source(connection: Connection, collection: str) -> Row[Any]:
    row = connection.execute(LOCK_SOURCE, {"collection": collection}).one_or_none()
    if row is None:
        raise CollectionNotFound.named(collection)
    return row


FIND_TABLE_BY_NAME = text("SELECT CAST(to_regclass(CAST(:table AS text)) AS oid)")

FIND_COLUMN = text("""
    SELECT pg_namespace.nspname AS schema, pg_class.relname AS name, pg_class.relkind AS kind,
           pg_attribute.attname AS key_column
      FROM pg_class
      JOIN pg_namespace ON pg_namespace.oid = pg_class.relnamespace
      JOIN pg_attribute ON pg_attribute.attrelid = pg_class.oid
     WHERE pg_class.oid = CAST(:oid AS oid)
       AND (pg_attribute.attnum = CAST(:number AS smallint) OR pg_attribute.attname = CAST(:column AS text))
       AND pg_attribute.attnum > 0 AND NOT pg_attribute.attisdropped
""")

TABLES: Final = ("r", "p")  # ordinary and partitioned tables


def find_key_table(
    connection: Connection, source: Source, table: str | None, key_column: str | None, reader_url: str | None
) -> FollowedTable:
    """Return the table and column that hold the query's keys.

    Names that are None are found by having Postgres plan the query. Raise InvalidOption.
    """
    reading = open_own(connection.engine, reader_url)
    try:
        with reading.connect() as session:
            origin, number, relations = _read_query(session, source)
    finally:
        reading.dispose()
    key = source.key_column
    if table is not None:
        oid = _find_table(connection, table)
        number = number if origin == oid else 0
    elif origin == 0:
        raise InvalidOption(
            f"The query's column {key!r} is computed, so its table cannot be determined; specify the table and the "
            "column that contains the keys."
        )
    else:
        oid = origin
    # The column is known by its number if Postgres reported it, and otherwise by its name.
    has_number = key_column is None and number > 0
    values = {
        "oid": oid,
        "number": number if has_number else 0,
        "column": "" if has_number else key_column or key,
    }
    row = connection.execute(FIND_COLUMN, values).one_or_none()
    if row is None:
        raise InvalidOption(f"The table has no column {(key_column or key)!r}; specify the key column.")
    if row.kind not in TABLES:
        raise InvalidOption(f"{row.schema}.{row.name} is not a table; only tables can have such triggers.")
    others = sorted(relations - {f"{row.schema}.{row.name}"})
    if table is None and others:
        raise InvalidOption(
            f"The query reads {', '.join(others)} in addition to {row.schema}.{row.name}; changes there would not be "
            "noticed until the next re-index. Specify the table to follow only that one."
        )
    return FollowedTable(row.schema, row.name, row.key_column)


def _find_table(connection: Connection, table: str) -> int:
    try:
        with connection.begin_nested():
            oid: int | None = connection.execute(FIND_TABLE_BY_NAME, {"table": table}).scalar_one()
    except (DBAPIError, UnicodeError):  # the text is not a valid name
        oid = None
    if oid is None:
        raise InvalidOption(f"There is no table {table[:200]!r}; write its name as in SQL, with its schema.")
    return oid


def _read_query(connection: Connection, source: Source) -> tuple[int, int, set[str]]:
    """Return the oid and column number of the table that the key comes from, and all tables of the query.

    The query runs with LIMIT 0 and is explained, so that no row is read. The numbers are (0, 0) if the key is
    computed.
    """
    query = ask_for(source.options["query"], rest="LIMIT 0")
    result = _ask(connection, query)
    plan = _ask(connection, f"EXPLAIN (VERBOSE, FORMAT JSON) {query}").get_value(0, 0)
    names = [(result.fname(position) or b"").decode() for position in range(result.nfields)]
    key = source.key_column
    if key not in names:
        raise InvalidOption(
            f"The query has no column {key!r}; its columns are {', '.join(map(repr, names))}."
        )
    position = names.index(key)
    (found,) = json.loads(plan or b"[]")
    nodes = [node for node in walk_plan(found["Plan"]) if "Relation Name" in node]
    relations = {f"{node['Schema']}.{node['Relation Name']}" for node in nodes}
    return result.ftable(position), result.ftablecol(position), relations


def _ask(connection: Connection, query: str) -> PGresult:
    """Execute a user's query by the extended protocol, which allows one statement. Raise InvalidOption."""
    result = driver_of(connection).pgconn.exec_params(query.encode(), [])
    if result.status != psycopg.pq.ExecStatus.TUPLES_OK:
        words = (result.error_message or b"").decode("utf-8", "replace").strip()
        raise InvalidOption(f"The query failed: {words.partition(chr(10))[0]}.")
    return result
