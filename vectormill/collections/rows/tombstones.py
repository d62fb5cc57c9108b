"""Tombstones: the memory that a key was deleted, so that a job submitted before does not bring it back.

Jobs, runs and deletions draw from one sequence. A commit writes no key whose tombstone is newer than its job, and no
commit overlaps a deletion: it would have looked for tombstones before there was one, and the deletion for rows before
there was one. So each commit holds a lock of its collection shared, and a deletion holds it alone.
"""

from collections.abc import Sequence
from typing import Any, Final

from psycopg import Cursor
from sqlalchemy import Connection, text

# The seed tells it from the lock of the collection's name, which stands for its generations.
HOLD_DELETIONS: Final = """
    SELECT collection_id, pg_advisory_xact_lock_shared(hashtextextended(CAST(collection_id AS text), 13))
      FROM vectormill.generations WHERE id = %(generation_id)s::bigint
"""

SHARE_DELETIONS: Final = text("""
    SELECT pg_advisory_xact_lock_shared(hashtextextended(CAST(CAST(:collection_id AS bigint) AS text), 13))
""")

LOCK_DELETIONS: Final = text("""
    SELECT pg_advisory_xact_lock(hashtextextended(CAST(CAST(:collection_id AS bigint) AS text), 13))
""")


def hold_deletions(cursor: Cursor[Any], generation_id: int) -> int | None:
    """Until the transaction ends nothing is deleted from the generation's collection; its id.

    Whoever writes rows of a generation says this before the statement that looks for tombstones. None for a generation
    that is gone.
    """
    row = cursor.execute(HOLD_DELETIONS, {"generation_id": generation_id}).fetchone()
    return None if row is None else int(row[0])


def hold_deletions_of(connection: Connection, collection_id: int) -> None:
    """Hold deletions of the collection with this id."""
    connection.execute(SHARE_DELETIONS, {"collection_id": collection_id})


def lock_deletions(connection: Connection, collection_id: int) -> None:
    """Until the transaction ends nobody else writes rows of the collection."""
    connection.execute(LOCK_DELETIONS, {"collection_id": collection_id})


# The clock and not the beginning of the transaction: whatever drew an earlier seq has begun before this moment.
BURY_KEYS: Final = text("""
    INSERT INTO vectormill.tombstones AS buried (collection_id, key, seq, deleted_at)
    SELECT :collection_id, key, max(place), clock_timestamp()
      FROM unnest(CAST(:keys AS text[]), CAST(:places AS bigint[])) AS gone (key, place)
     GROUP BY key ORDER BY key
    ON CONFLICT (collection_id, key) DO UPDATE
       SET seq = excluded.seq, deleted_at = excluded.deleted_at, scrubbed_at = NULL
     WHERE buried.seq < excluded.seq
""")


def bury_keys(connection: Connection, collection_id: int, keys: Sequence[str], places: Sequence[int]) -> None:
    """Write a tombstone of each key in its place in the order of writers.

    The caller has locked the deletions of the collection.
    """
    values = {"collection_id": collection_id, "keys": list(keys), "places": list(places)}
    connection.execute(BURY_KEYS, values)
