"""Deletions: a deleted key leaves a tombstone, so that no earlier job brings it back, and its texts are scrubbed.

Jobs, runs and deletions draw numbers from one sequence. A commit writes no key whose tombstone is newer than its job.
No commit may overlap a deletion, or the commit would miss the tombstone and the deletion would miss the row. So every
commit takes a shared lock of the collection, and a deletion takes it exclusively.

Texts of deleted items are scrubbed from the payloads of jobs that still have them. A pass goes through the ended jobs
of one collection that are older than its deletions, a few payloads at a time, and finds which of their keys were
deleted after the job. Open jobs and runs are waited for: their texts may be in a worker's memory, and a run may not
even have made its job.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from psycopg import Cursor
from sqlalchemy import Connection, text

from vectormill.jobs.chunk import empty_items, read_keys, write_payload
from vectormill.jobs.job import OPEN_JOB_STATES
from vectormill.objects.reference import MARK
from vectormill.runs.run import OPEN_RUN_STATES

# The hash seed 13 tells this lock from that of the collection's name, which guards its generations.
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
    """Block deletions from the generation's collection until the transaction ends, and return the collection's id.

    A transaction that writes rows calls this before the statement that looks for tombstones. Return None if the
    generation does not exist.
    """
    row = cursor.execute(HOLD_DELETIONS, {"generation_id": generation_id}).fetchone()
    return None if row is None else int(row[0])


def hold_deletions_of(connection: Connection, collection_id: int) -> None:
    """Block deletions from the collection with this id until the transaction ends; several may hold this lock."""
    connection.execute(SHARE_DELETIONS, {"collection_id": collection_id})


def lock_deletions(connection: Connection, collection_id: int) -> None:
    """Block all other writes and deletions in the collection until the transaction ends."""
    connection.execute(LOCK_DELETIONS, {"collection_id": collection_id})


# This is the time of the statement, not of the transaction's begin: any transaction that drew a smaller seq began
# before it.
WRITE_TOMBSTONES: Final = text("""
    INSERT INTO vectormill.tombstones AS buried (collection_id, key, seq, deleted_at)
    SELECT :collection_id, key, max(place), clock_timestamp()
      FROM unnest(CAST(:keys AS text[]), CAST(:places AS bigint[])) AS gone (key, place)
     GROUP BY key ORDER BY key
    ON CONFLICT (collection_id, key) DO UPDATE
       SET seq = excluded.seq, deleted_at = excluded.deleted_at, scrubbed_at = NULL
     WHERE buried.seq < excluded.seq
""")


def write_tombstones(
    connection: Connection, collection_id: int, keys: Sequence[str], places: Sequence[int]
) -> None:
    """Write a tombstone for each key; `places` are their sequence numbers among all writers.

    The caller has called `lock_deletions` for the collection.
    """
    values = {"collection_id": collection_id, "keys": list(keys), "places": list(places)}
    connection.execute(WRITE_TOMBSTONES, values)


@dataclass(frozen=True, slots=True)
class Pass:
    """A scrubbing pass: the deletions of a collection up to `seq` and before `began`.

    All jobs and runs of the collection that are older than these deletions have ended.
    """

    collection_id: int
    seq: int
    began: datetime


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a scrubbing pass: after chunk `chunk_seq` of this job.

    `place` is the job's sequence number among all writers, which may be smaller than its `job_seq`.
    """

    job_id: UUID
    job_seq: int
    place: int
    chunk_seq: int = -1


FIND_UNSCRUBBED: Final = text("""
    SELECT min(collection_id) FROM vectormill.tombstones WHERE scrubbed_at IS NULL AND collection_id > :after
""")

# An upload has the generation that was live when it began. One without may be meant for this collection: its process is
# of an older release, or the collection did not exist. Jobs that are being deleted still have their payloads for a
# moment.
FIND_OLDEST_OPEN: Final = text(f"""
    SELECT min(seq) FROM (
        SELECT oldest.place FROM vectormill.generations
         CROSS JOIN LATERAL (
               SELECT coalesce(place, seq) AS place FROM vectormill.jobs
                WHERE jobs.generation_id = generations.id AND state IN {OPEN_JOB_STATES}
                ORDER BY coalesce(place, seq) LIMIT 1) AS oldest
         WHERE generations.collection_id = :collection_id
         UNION ALL
        SELECT min(seq) FROM vectormill.jobs WHERE state = 'uploading' AND generation_id IS NULL
         UNION ALL
        SELECT coalesce(jobs.place, jobs.seq) FROM vectormill.jobs
          LEFT JOIN vectormill.generations ON generations.id = jobs.generation_id
         WHERE jobs.state = 'deleting' AND (generations.collection_id = :collection_id OR generations.id IS NULL)
         UNION ALL
        SELECT runs.seq FROM vectormill.runs
         WHERE runs.collection_id = :collection_id
           AND runs.state IN {OPEN_RUN_STATES}
    ) AS open (seq)
""")

# A transaction that drew a smaller seq than a deletion began before it, so it has ended or is in pg_stat_activity.
FIND_LAST_DELETION: Final = text("""
    SELECT max(seq) AS seq, clock_timestamp() AS began FROM vectormill.tombstones
     WHERE collection_id = :collection_id AND scrubbed_at IS NULL
       AND (CAST(:before_seq AS bigint) IS NULL OR seq < :before_seq)
       AND deleted_at < (SELECT coalesce(min(xact_start), now()) FROM pg_stat_activity
                          WHERE datname = current_database() AND backend_type = 'client backend'
                            AND pid <> pg_backend_pid())
""")


def find_pass(connection: Connection, after: int) -> Pass | int | None:
    """Return the scrubbing pass of the next collection, by id, after `after` that has unscrubbed deletions.

    Return its id alone if older jobs or runs are still open, and None if there is no further collection.
    """
    collection_id = connection.execute(FIND_UNSCRUBBED, {"after": after}).scalar_one()
    if collection_id is None:
        return None
    # With this lock no deletion is in progress, so the pass sees all earlier ones. A run or a follower may still write
    # a tombstone with a smaller seq, which waits for the next pass.
    hold_deletions_of(connection, collection_id)
    values = {"collection_id": collection_id, "before_seq": find_oldest_open(connection, collection_id)}
    last = connection.execute(FIND_LAST_DELETION, values).one()
    return collection_id if last.seq is None else Pass(collection_id, last.seq, last.began)


def find_oldest_open(connection: Connection, collection_id: int) -> int | None:
    """Return the seq of the oldest open job or run that may hold texts of the collection, or None."""
    seq: int | None = connection.execute(FIND_OLDEST_OPEN, {"collection_id": collection_id}).scalar_one()
    return seq


FIND_NEXT_JOB: Final = text("""
    SELECT jobs.id, jobs.seq, coalesce(jobs.place, jobs.seq) AS place FROM vectormill.jobs
     WHERE jobs.seq > :after_seq AND coalesce(jobs.place, jobs.seq) < :before_seq
       AND jobs.generation_id = ANY(ARRAY(
           SELECT id FROM vectormill.generations WHERE collection_id = :collection_id))
     ORDER BY jobs.seq LIMIT 1
""")


def find_next_job(connection: Connection, wanted: Pass, after_seq: int) -> Position | None:
    """Return the position before the first chunk of the next job of the pass; None if there is no further job."""
    values = {
        "after_seq": after_seq,
        "before_seq": wanted.seq,
        "collection_id": wanted.collection_id,
    }
    row = connection.execute(FIND_NEXT_JOB, values).one_or_none()
    return None if row is None else Position(row.id, row.seq, row.place)


# The row lock makes a retry of the job wait until these payloads are scrubbed; then it finds no deleted texts.
LOCK_ENDED_JOB: Final = text("""
    SELECT finished_at IS NOT NULL FROM vectormill.jobs WHERE id = :job_id FOR NO KEY UPDATE
""")

LIST_PAYLOADS: Final = text("""
    SELECT chunks.id, chunks.seq, payload.items
      FROM vectormill.chunks LEFT JOIN LATERAL vectormill.payload_of(chunks.id) AS payload ON true
     WHERE chunks.job_id = :job_id AND chunks.seq > :after_seq
     ORDER BY chunks.seq LIMIT :limit
""")

LIST_BURIED: Final = text("""
    SELECT key FROM vectormill.tombstones
     WHERE collection_id = :collection_id AND key = ANY(CAST(:keys AS text[])) AND seq > :place
""")


def scrub_payloads(
    connection: Connection, wanted: Pass, position: Position, limit: int
) -> tuple[Position | None, int]:
    """Empty deleted items in the next `limit` payloads of a job.

    Return the new position, or None after the job's last chunk, and the number of emptied items. Raise LookupError if a
    retry has reopened the job, which ends the pass.
    """
    has_ended = connection.execute(LOCK_ENDED_JOB, {"job_id": position.job_id}).scalar_one_or_none()
    if has_ended is None:
        return None, 0  # the job and its payloads have been removed meanwhile
    if not has_ended:
        raise LookupError(f"Job {position.job_id} is running again.")
    values = {"job_id": position.job_id, "after_seq": position.chunk_seq, "limit": limit}
    rows = connection.execute(LIST_PAYLOADS, values).all()
    num_emptied = 0
    for row in rows:
        if row.items is None:  # the chunk was split, and its halves have the items
            continue
        keys = {
            "collection_id": wanted.collection_id,
            "keys": read_keys(row.items),
            "place": position.place,
        }
        buried = set(connection.execute(LIST_BURIED, keys).scalars())
        blob, num_items = empty_items(row.items, buried) if buried else (None, 0)
        if blob is not None:
            write_payload(connection, row.id, blob)
            num_emptied += num_items
    if len(rows) < limit:
        return None, num_emptied
    return replace(position, chunk_seq=rows[-1].seq), num_emptied


LIST_SCRUBBED: Final = text("""
    SELECT key, seq FROM vectormill.tombstones
     WHERE collection_id = :collection_id AND scrubbed_at IS NULL AND seq <= :seq AND deleted_at < :began
       AND key > :after
     ORDER BY key LIMIT 1000
""")

MARK_SCRUBBED: Final = text("""
    UPDATE vectormill.tombstones AS buried SET scrubbed_at = now()
      FROM unnest(CAST(:keys AS text[]), CAST(:seqs AS bigint[])) AS scrubbed (key, seq)
     WHERE buried.collection_id = :collection_id AND buried.key = scrubbed.key AND buried.seq = scrubbed.seq
""")


def finish_pass(connection: Connection, wanted: Pass, after: str) -> str | None:
    """Mark the next tombstones of a pass, after key `after`, as scrubbed. Return the last key, or None at the end."""
    rows = connection.execute(LIST_SCRUBBED, {**asdict(wanted), "after": after}).all()
    if not rows:
        return None
    keys, seqs = [row.key for row in rows], [row.seq for row in rows]
    marked = {"collection_id": wanted.collection_id, "keys": keys, "seqs": seqs}
    connection.execute(MARK_SCRUBBED, marked)
    return str(keys[-1])


# A scrubbed tombstone is not needed any more: all older jobs and runs have ended, and a retry finds no text. Only an
# import may still have the key, so a collection's first day and an hour keep all tombstones (see imports.py). So does
# an older job by reference until its own end, since a retry reads the texts from their object again. The payloads of a
# job are all references, or none is.
DELETE_SCRUBBED: Final = text("""
    WITH due AS MATERIALIZED (
        SELECT collection_id, max(seq) AS seq FROM vectormill.tombstones
         WHERE scrubbed_at < now() - make_interval(secs => :kept_seconds)
           AND collection_id IN (SELECT id FROM vectormill.collections
                                  WHERE created_at < now() - 25 * make_interval(secs => :kept_seconds))
         GROUP BY collection_id
    ), kept AS MATERIALIZED (
        SELECT due.collection_id, oldest.place
          FROM due
         CROSS JOIN LATERAL (
               SELECT coalesce(jobs.place, jobs.seq) AS place
                 FROM vectormill.generations
                 JOIN vectormill.jobs ON jobs.generation_id = generations.id
                CROSS JOIN LATERAL (
                      SELECT id FROM vectormill.chunks WHERE job_id = jobs.id AND state <> 'split' LIMIT 1) AS first
                CROSS JOIN LATERAL vectormill.payload_of(first.id) AS payload
                WHERE generations.collection_id = due.collection_id AND coalesce(jobs.place, jobs.seq) < due.seq
                  AND substr(payload.items, 1, octet_length(CAST(:mark AS bytea))) = :mark
                ORDER BY coalesce(jobs.place, jobs.seq) LIMIT 1) AS oldest
    )
    DELETE FROM vectormill.tombstones WHERE ctid = ANY(ARRAY(
        SELECT buried.ctid
          FROM vectormill.tombstones AS buried
          JOIN due ON due.collection_id = buried.collection_id
          LEFT JOIN kept ON kept.collection_id = buried.collection_id
         WHERE scrubbed_at < now() - make_interval(secs => :kept_seconds)
           AND (kept.place IS NULL OR buried.seq < kept.place)
         LIMIT 10000 FOR UPDATE OF buried SKIP LOCKED))
    RETURNING 1
""")


def delete_scrubbed(connection: Connection, kept_seconds: float = 3600.0) -> int:
    """Delete up to 10,000 tombstones that were scrubbed at least `kept_seconds` ago, and return their number.

    Those of a collection that was created less than 25 times as long ago are kept, and those that are newer than a job
    by reference.
    """
    values = {"kept_seconds": float(kept_seconds), "mark": MARK}
    return len(connection.execute(DELETE_SCRUBBED, values).all())
