"""Recomputation: put chunks back whose results a faulty model process has computed (decision 0078)."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from vectormill.collections.collection import FORMER_GENERATION_STATES
from vectormill.jobs.chunk import OPEN_CHUNK_STATES, decode_payload
from vectormill.jobs.item import MODEL_FAULTS
from vectormill.jobs.job import COMPLETED, COMPLETED_WITH_ERRORS, FAILED, PAUSED, QUEUED, RUNNING
from vectormill.jobs.jobs import COUNT_IDLE_SECONDS, has_lost_collection, lock_job
from vectormill.jobs.transitions import REOPEN_CHUNK, WAKE_DISPATCHER, add_up_job
from vectormill.objects.reference import is_reference

# The states of jobs whose chunks can be encoded again. A job that was cancelled stays as it is.
MENDED_JOB_STATES: Final = (QUEUED, RUNNING, PAUSED, COMPLETED, COMPLETED_WITH_ERRORS, FAILED)

# This condition holds if the period has computed one of the results of a chunk, and they are not about to be replaced
# already. If the chunk was split, its halves have the vectors.
_IS_OF_PERIOD: Final = f"""(proof_id = :period OR :period = ANY(earlier_proofs)) AND state <> 'split'
           AND NOT (state IN {OPEN_CHUNK_STATES} AND is_faulty IS TRUE)"""

# No index is on the periods, for which every commit would pay; this is read once after a fault.
LIST_COMPUTED = text(f"""
    WITH page AS MATERIALIZED (
        SELECT id, state, proof_id, earlier_proofs, is_faulty
          FROM vectormill.chunks WHERE id > :after ORDER BY id LIMIT :limit
    )
    SELECT max(id) AS last, coalesce(array_agg(id) FILTER (WHERE {_IS_OF_PERIOD}), '{{}}') AS found
      FROM page
""")


def list_computed_chunks(
    connection: Connection, period: int, after: int, limit: int
) -> tuple[int | None, Sequence[int]]:
    """Read a page of all chunks, those with an id above `after`.

    Return the last id of the page, None if it is empty, and the ids of chunks with vectors that were computed in the
    period.
    """
    row = connection.execute(LIST_COMPUTED, {"period": period, "after": after, "limit": limit}).one()
    return row.last, row.found


# The scheduler waits for nobody's lock here: what somebody holds is looked at again.
LOCK_CHUNK = text(f"""
    SELECT chunk.id, job_id, chunk.state, first_item, chunk.num_items, only_items,
           job.state = 'deleting' AS is_deleted
      FROM (SELECT * FROM vectormill.chunks WHERE id = :chunk_id AND {_IS_OF_PERIOD}) AS chunk
      JOIN vectormill.jobs AS job ON job.id = chunk.job_id
       FOR NO KEY UPDATE OF chunk, job SKIP LOCKED
""")

# This reads the texts, without which the chunk cannot be encoded again, and whether something was already made of the
# results that is not made anew: an output in an object store, the answers of a batch, or a generation that is not read
# any more.
FIND_OBSTACLES = text(f"""
    SELECT payload.items,
           EXISTS (SELECT 1 FROM vectormill.job_outputs WHERE job_outputs.id = jobs.id) AS has_output,
           EXISTS (SELECT 1 FROM vectormill.request_batches AS batch WHERE batch.job_id = jobs.id) AS has_batch,
           generations.state IN {FORMER_GENERATION_STATES} AS is_replaced
      FROM vectormill.jobs
      LEFT JOIN vectormill.generations ON generations.id = jobs.generation_id
      LEFT JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = :chunk_id
     WHERE jobs.id = :job_id
""")

LIST_FAILED = text("""
    SELECT item - :first_item FROM vectormill.item_errors
     WHERE job_id = :job_id AND item >= :first_item AND item < :end_item AND code <> ALL(:codes)
""")

FORGET_PERIODS = text("""
    UPDATE vectormill.chunks SET proof_id = NULL, earlier_proofs = NULL WHERE id = :chunk_id
""")
MARK_SUSPECT = text("UPDATE vectormill.chunks SET is_suspect = true WHERE id = :chunk_id")


def recompute_chunk(connection: Connection, chunk_id: int, period: int, reason: str) -> bool | None:
    """Let all items of a chunk be encoded again, and its job be open, if one was computed in this period.

    Items that failed for what they are stay as they are, and so do those whose text was deleted since. The rows keep
    the place that their job has in the order of writers, so newer ones are not touched. Return False if the chunk
    cannot be encoded again; it then stays with the failed period, and is marked as suspect. Return None if it has been
    split or put back meanwhile, or if somebody holds it or its job.
    """
    chunk = connection.execute(LOCK_CHUNK, {"chunk_id": chunk_id, "period": period}).one_or_none()
    if chunk is None:
        return None
    if chunk.is_deleted or _reopen_chunk(connection, chunk, reason):
        return True
    connection.execute(MARK_SUSPECT, {"chunk_id": chunk_id})
    return False


def _reopen_chunk(connection: Connection, chunk: Row[Any], reason: str) -> bool:
    """Make the locked chunk and its job open again. Return False if it cannot be encoded again."""
    chunk_id = chunk.id
    job = lock_job(connection, chunk.job_id)
    found = connection.execute(FIND_OBSTACLES, {"chunk_id": chunk_id, "job_id": job.id}).one()
    obstacles = (found.items is None, found.has_output, found.has_batch, found.is_replaced)
    if job.state not in MENDED_JOB_STATES or any(obstacles) or has_lost_collection(connection, job.id):
        return False
    end_item = chunk.first_item + chunk.num_items
    values = {"job_id": job.id, "first_item": chunk.first_item, "end_item": end_item}
    failed = set(connection.execute(LIST_FAILED, {**values, "codes": list(MODEL_FAULTS)}).scalars())
    texts = [] if is_reference(found.items) else decode_payload(found.items).texts
    wanted = [item for item in range(chunk.num_items) if item not in failed and (not texts or texts[item])]
    if not wanted:  # the period has computed nothing
        connection.execute(FORGET_PERIODS, {"chunk_id": chunk_id})
        return True
    waiting: Sequence[int] = []  # what a retry wants anyway, which has no vector and no error
    if chunk.state in OPEN_CHUNK_STATES:
        waiting = wanted if chunk.only_items is None else chunk.only_items
    if job.is_terminal:
        connection.execute(COUNT_IDLE_SECONDS, {"job_id": job.id})
    values |= {"chunk_id": chunk_id, "reason": reason, "items": wanted}
    connection.execute(REOPEN_CHUNK, {**values, "num_ended": len(set(wanted).difference(waiting))})
    add_up_job(connection, job.id)
    connection.execute(WAKE_DISPATCHER)
    return True


LIST_SUSPECT = text("""
    SELECT chunks.id, chunks.job_id, collections.name, chunks.first_item, chunks.num_items, proof.worker,
           proof.failed_at, proof.reason
      FROM vectormill.chunks
      JOIN vectormill.jobs ON jobs.id = chunks.job_id AND jobs.state <> 'deleting'
      LEFT JOIN vectormill.generations ON generations.id = jobs.generation_id
      LEFT JOIN vectormill.collections ON collections.id = generations.collection_id
      LEFT JOIN LATERAL (
            SELECT worker, failed_at, reason FROM vectormill.proofs
             WHERE id = ANY(array_append(chunks.earlier_proofs, chunks.proof_id))
             ORDER BY failed_at LIMIT 1) AS proof ON true
     WHERE chunks.is_suspect AND chunks.state <> 'split' AND chunks.id > :after
     ORDER BY chunks.id LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class SuspectChunk:
    """A chunk of a faulty worker that cannot be encoded again: `num_items` items of a job, from `first_item` on.

    `worker`, `failed_at` and `reason` are those of the bad proof; None once that is older than the retention of jobs.
    """

    id: int
    job_id: UUID
    collection: str | None
    first_item: int
    num_items: int
    worker: str | None
    failed_at: datetime | None
    reason: str | None


def list_suspect_chunks(connection: Connection, *, after: int | None, limit: int) -> list[SuspectChunk]:
    """List suspect chunks of all jobs that still exist, with ids above `after`; a keyset page."""
    rows = connection.execute(LIST_SUSPECT, {"after": after or 0, "limit": limit})
    return [SuspectChunk(*row) for row in rows]
