"""Items of a collection: read one by its key, delete items from every generation, and follow jobs of puts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.collections import find_generation, list_written_generations
from vectormill.collections.generation_tables import attributes_name, table_name
from vectormill.collections.tombstones import lock_deletions, write_tombstones
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import CollectionNotFound, ItemNotFound
from vectormill.domain.task import VECTORS
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.job import DELETING, TERMINAL_JOB_STATES
from vectormill.jobs.jobs import draw_seq
from vectormill.results.kind import Results


@dataclass(frozen=True, slots=True)
class KeptItem:
    """The row of one key in a collection. `results` is its result in the column's type, None if not requested.

    `text` is None unless the collection keeps texts, and `text_pair` is None unless the item is a pair. `content_hash`
    is a hash of both, 16 bytes. `job_seq` is the sequence number of its last writer.
    """

    key: str
    spec: EncodingSpec
    content_hash: bytes
    job_seq: int
    metadata: dict[str, Any] | None
    text: str | None
    text_pair: str | None
    results: Results | None


FIND_ITEM: Final = """
    SELECT live.key, live.content_hash, live.job_seq, kept.metadata, {texts}, {result} AS result
      FROM vectormill.{table} AS live LEFT JOIN vectormill.{attributes} AS kept ON kept.key = live.key
     WHERE live.key = :key
"""


def find_item(connection: Connection, collection: str, key: str, *, has_vector: bool = False) -> KeptItem:
    """Return the item of this key in the live generation; its vector is only read if `has_vector`.

    Raise CollectionNotFound and ItemNotFound.
    """
    generation = find_generation(connection, collection)
    kind, spec = open_kind(driver_of(connection), generation.spec), generation.spec
    is_read = has_vector or generation.kind != VECTORS
    statement = FIND_ITEM.format(
        table=generation.table_name,
        attributes=attributes_name(generation.id),
        texts=", ".join(f"kept.{column}" for column in spec.text_columns),
        result=kind.sent(spec, "live") if is_read else "NULL",
    )
    row = connection.execute(text(statement), {"key": key}).one_or_none()
    if row is None:
        raise ItemNotFound(f"Collection {collection!r} has no item {key!r}.")
    return KeptItem(
        row.key,
        spec,
        bytes(row.content_hash),
        row.job_seq,
        row.metadata,
        row.text,
        getattr(row, "text_pair", None),
        kind.read(row.result, spec) if is_read else None,
    )


# Rows are locked in the order of their keys, as in every commit, so that no deadlock can occur.
DELETE_ROWS: Final = """
    WITH doomed AS MATERIALIZED (
        SELECT live.key
          FROM unnest(CAST(:keys AS text[]), CAST(:places AS bigint[])) AS gone (key, place)
          JOIN vectormill.{table} AS live ON live.key = gone.key
         WHERE live.key = ANY(CAST(:keys AS text[])) AND live.job_seq < gone.place
         ORDER BY live.key FOR UPDATE OF live
    ), attributes AS (
        DELETE FROM vectormill.{attributes} WHERE key = ANY(ARRAY(SELECT key FROM doomed))
    ), gone AS (
        DELETE FROM vectormill.{table} WHERE key = ANY(ARRAY(SELECT key FROM doomed)) RETURNING 1
    )
    SELECT count(*) FROM gone
"""


def delete_rows(
    connection: Connection, generation_id: int, keys: Sequence[str], places: Sequence[int]
) -> int:
    """Delete the rows of these keys that were written before the key's sequence number in `places`; return how many.

    This leaves no tombstones: see `delete_items` and `remove_items`. The caller has called `lock_deletions`, or knows
    that nobody else writes these rows.
    """
    if not keys:
        return 0
    names = {"table": table_name(generation_id), "attributes": attributes_name(generation_id)}
    statement = text(DELETE_ROWS.format(**names))
    number: int = connection.execute(statement, {"keys": list(keys), "places": list(places)}).scalar_one()
    return number


def delete_items(connection: Connection, collection: str, keys: Iterable[str]) -> int:
    """Delete the keys from all generations, and keep earlier jobs from writing them. Return how many were live.

    Commits into the collection wait until the transaction ends, so pass few keys at a time. Texts in payloads of jobs
    are scrubbed later: see tombstones.py. Raise CollectionNotFound.
    """
    unique = sorted(set(keys))
    generations = list_written_generations(connection, collection, is_deletion=True)
    if not generations:
        raise CollectionNotFound.named(collection)
    if not unique:
        return 0
    lock_deletions(connection, generations[0].collection_id)
    return _bury(connection, generations, unique, [draw_seq(connection)] * len(unique))


def remove_items(
    connection: Connection, generation: Generation, keys: Sequence[str], places: Sequence[int]
) -> int:
    """Remove keys that a run or a follower no longer found in the source; return the number of rows removed.

    If the generation is live, the keys are deleted from all generations, with tombstones. From a generation that is
    being built only its own rows are removed, since nobody sees it yet and it may never become live. `places` are the
    sequence numbers of the removals. The caller has called `share_collection`.
    """
    lock_deletions(connection, generation.collection_id)
    if not keys:
        return 0
    if generation.state != LIVE:
        return delete_rows(connection, generation.id, keys, places)
    generations = list_written_generations(connection, generation.collection, is_deletion=True)
    return _bury(connection, generations, keys, places)


def _bury(
    connection: Connection, generations: Sequence[Generation], keys: Sequence[str], places: Sequence[int]
) -> int:
    """Write tombstones and delete older rows from these generations; return how many rows the live one lost."""
    write_tombstones(connection, generations[0].collection_id, keys, places)
    num_deleted = 0
    for generation in generations:
        num_rows = delete_rows(connection, generation.id, keys, places)
        num_deleted += num_rows if generation.state == LIVE else 0
    return num_deleted


@dataclass(frozen=True, slots=True)
class PutEnd:
    """The outcome of a job of puts. `failures` are item errors by key; `state` is None if the job no longer exists."""

    job_id: UUID
    state: str | None
    finished_at: datetime | None
    failures: Mapping[str, ItemFailure]


# This look-up by primary key runs up to a hundred times a second, for all jobs that clients wait for.
FIND_PUTS: Final = text("""
    SELECT id, state, finished_at, num_failed FROM vectormill.jobs WHERE id = ANY(CAST(:job_ids AS uuid[]))
""")

LIST_PUT_FAILURES: Final = text("""
    SELECT job_id, key, code, detail FROM vectormill.item_errors WHERE job_id = ANY(CAST(:job_ids AS uuid[]))
""")


def find_ended_puts(connection: Connection, job_ids: Sequence[UUID]) -> list[PutEnd]:
    """Return the outcomes of those of these jobs that have ended or no longer exist."""
    rows = {row.id: row for row in connection.execute(FIND_PUTS, {"job_ids": list(job_ids)})}
    failed = [row.id for row in rows.values() if row.num_failed and row.state in TERMINAL_JOB_STATES]
    failures: dict[UUID, dict[str, ItemFailure]] = {job_id: {} for job_id in failed}
    if failed:
        for row in connection.execute(LIST_PUT_FAILURES, {"job_ids": failed}):
            failures[row.job_id][row.key] = ItemFailure(row.code, row.detail)
    ends = []
    for job_id in job_ids:
        job = rows.get(job_id)
        if job is None or job.state == DELETING:
            ends.append(PutEnd(job_id, None, None, {}))
        elif job.state in TERMINAL_JOB_STATES:
            ends.append(PutEnd(job_id, job.state, job.finished_at, failures.get(job_id, {})))
    return ends


# The chunks are deleted by cascade, and their texts by the pruner. No worker holds a chunk of a job that has ended, and
# a retried job is open again.
DELETE_ENDED_PUTS: Final = text("""
    DELETE FROM vectormill.jobs
     WHERE id = ANY(CAST(:job_ids AS uuid[])) AND finished_at IS NOT NULL AND forget_at = 'infinity'
""")


def delete_ended_puts(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Delete ended jobs of puts with their texts, once their clients have been answered."""
    connection.execute(DELETE_ENDED_PUTS, {"job_ids": list(job_ids)})
