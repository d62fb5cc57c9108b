"""Changes of tables that collections follow: keys that triggers have noted, in the transaction that changed them.

Ids are drawn before their transactions commit, so a later id may be seen before an earlier one: nobody remembers how
far they came. What is read is removed by its ids, in the transaction that makes its effect durable; whoever finds one
of them gone does nothing at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.generations import find_written, list_written_generations
from vectormill.collections.rows.generation_tables import table_name
from vectormill.collections.rows.items import remove_items
from vectormill.domain.errors import Conflict
from vectormill.jobs.job import TENDED_JOB_STATES
from vectormill.runs.differences import list_failed_keys
from vectormill.sources.source import Source

# The key that stands for the whole table; no item has such a key.
WHOLE_TABLE: Final = ""

# One step from collection to collection: however many changes wait, as many rows are looked at as collections have any.
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
    """List ids of collections of which changes wait, whether they still exist or not."""
    return list(connection.execute(LIST_CHANGED_COLLECTIONS).scalars())


@dataclass(frozen=True, slots=True)
class FollowedCollection:
    """A collection and its source. `is_busy`: a job of its changes is open, and the next waits for it."""

    id: int
    name: str
    source: Source | None
    is_busy: bool


# The job of the last changes: with one at a time what is read later is written later, and what is compared with is
# there. One that has been open for so long waits for workers or a retry; what comes after it is not to wait too.
FIND_FOLLOWED_COLLECTION = text(f"""
    SELECT collections.id, collections.name, sources.kind, sources.options, sources.split,
           EXISTS (SELECT 1 FROM vectormill.jobs
                    WHERE state IN {TENDED_JOB_STATES}
                      AND created_at > now() - make_interval(secs => CAST(:patience_seconds AS double precision))
                      AND metadata @> jsonb_build_object('changes_of', collections.name)) AS is_busy
      FROM vectormill.collections
      LEFT JOIN vectormill.sources ON sources.collection_id = collections.id
     WHERE collections.id = :id
""")


def find_followed_collection(
    connection: Connection, collection_id: int, patience_seconds: float
) -> FollowedCollection | None:
    """Find a collection and its source; None for one that is gone."""
    values = {"id": collection_id, "patience_seconds": patience_seconds}
    row = connection.execute(FIND_FOLLOWED_COLLECTION, values).one_or_none()
    if row is None:
        return None
    source = None if row.kind is None else Source(row.kind, row.options, row.split)
    return FollowedCollection(row.id, row.name, source, row.is_busy)


# The seed tells it from the locks of the collection's name and of its deletions.
TRY_TO_FOLLOW = text("""
    SELECT pg_try_advisory_xact_lock(hashtextextended(CAST(CAST(:collection_id AS bigint) AS text), 17))
""")


def try_to_follow(connection: Connection, collection_id: int) -> bool:
    """Return True if nobody else follows it, until the transaction ends. It saves work; nothing depends on it."""
    is_ours: bool = connection.execute(TRY_TO_FOLLOW, {"collection_id": collection_id}).scalar_one()
    return is_ours


@dataclass(frozen=True, slots=True)
class Changes:
    """Some changes of one collection, by id: `keys` are distinct, without WHOLE_TABLE; `ids` are all of them."""

    ids: Sequence[int]
    keys: Sequence[str]
    is_whole: bool


LIST_CHANGES = text("""
    SELECT id, key FROM vectormill.source_changes WHERE collection_id = :collection_id ORDER BY id LIMIT :limit
""")


def list_changes(connection: Connection, collection_id: int, *, max_keys: int, limit: int) -> Changes:
    """Return the oldest `limit` changes of at most `max_keys` keys; later ones of a key come with its first."""
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
    """Remove changes in the transaction that makes their effect durable. Raises Conflict if one is gone."""
    if connection.execute(REMOVE_CHANGES, {"ids": list(ids)}).rowcount != len(ids):
        raise Conflict("Another follower was faster.")


REMOVE_CHANGES_OF_COLLECTION = text("""
    DELETE FROM vectormill.source_changes WHERE collection_id = :collection_id
""")


def forget_changes(connection: Connection, collection_id: int) -> int:
    """Remove the changes of a collection that nobody follows any more; return how many."""
    return connection.execute(REMOVE_CHANGES_OF_COLLECTION, {"collection_id": collection_id}).rowcount


NOTE_KEYS = text("""
    INSERT INTO vectormill.source_changes (collection_id, key)
    SELECT :collection_id, key FROM unnest(CAST(:keys AS text[])) AS key
""")


def note_keys(connection: Connection, collection_id: int, keys: Sequence[str]) -> None:
    """Note changed keys as the triggers would."""
    connection.execute(NOTE_KEYS, {"collection_id": collection_id, "keys": list(keys)})


NOTE_EVERY_KEY: Final = """
    INSERT INTO vectormill.source_changes (collection_id, key)
    SELECT DISTINCT :collection_id, coalesce(kept.document, live.key)
      FROM vectormill.{table} AS live LEFT JOIN vectormill.{table}_attributes AS kept ON kept.key = live.key
"""


def note_every_key(connection: Connection, collection: str) -> None:
    """Note every document of the collection as changed: what the table was emptied of is looked for by key."""
    for generation in list_written_generations(connection, collection):
        statement = text(NOTE_EVERY_KEY.format(table=table_name(generation.id)))
        connection.execute(statement, {"collection_id": generation.collection_id})


LIST_PASSAGES: Final = """
    SELECT key FROM vectormill.{table}_attributes WHERE document = ANY(CAST(:documents AS text[]))
"""


def list_passages(connection: Connection, collection: str, documents: Sequence[str]) -> set[str]:
    """Return the keys of the passages of these documents, in the live generation or one that is built."""
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
    """List some whose former rows are still there, the oldest first."""
    return [FailedJob(row.id, row.generation_id) for row in connection.execute(LIST_FAILED_JOBS)]


def remove_failed(connection: Connection, job: FailedJob) -> int:
    """Remove the rows that keys had before a text that could not be encoded; return how many.

    The job is kept from then on as long as any other, so that its errors can be read and it can be tried again.
    """
    try:
        generation = find_written(connection, job.generation_id)
    except Conflict:  # nobody reads what it wrote any more
        number = 0
    else:
        number = _remove_failed(connection, job.id, generation)
    connection.execute(KEEP_FAILED_JOB, {"job_id": job.id})
    return number


def _remove_failed(connection: Connection, job_id: UUID, generation: Generation) -> int:
    number, after = 0, -1
    while failed := list_failed_keys(connection, job_id, after=after, limit=1000):
        keys, places = [key for _, key, _ in failed], [place for _, _, place in failed]
        number += remove_items(connection, generation, keys, places)
        after = failed[-1][0]
    return number
