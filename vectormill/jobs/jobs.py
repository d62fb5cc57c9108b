"""Jobs as clients use them: find, list, pause, resume, cancel, retry, and list the errors of items."""

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, Row, text

from vectormill.collections.collection import FORMER_GENERATION_STATES
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import JobNotFound, WrongJobState
from vectormill.jobs.job import (
    PAUSED,
    Job,
    state_after_cancel,
    state_after_pause,
    state_after_resume,
    state_after_retry,
)
from vectormill.jobs.transitions import (
    CANCEL_WAITING_CHUNKS,
    LOCK_FAILED_CHUNKS,
    RECALL_CHUNKS,
    RETRY_FAILED_ITEMS,
    WAKE_DISPATCHER,
    add_up_job,
)
from vectormill.objects.input import cancel_input
from vectormill.objects.output import reopen_output

# Each field of Job is read from the column of the same name, except for these.
OTHER_COLUMNS = {
    "collection": "collections.name AS collection",
    "now": "now() AS now",
    "output_url": "job_outputs.url AS output_url",
    "output_state": "job_outputs.state AS output_state",
    "output_table": "job_outputs.table_url AS output_table",
    "output_error": "job_outputs.last_error AS output_error",
    "input_state": "job_inputs.state AS input_state",
    "input_items": "job_inputs.num_items AS input_items",
    "input_compared": "job_inputs.num_compared AS input_compared",
    "input_error": "job_inputs.error AS input_error",
}
JOB_COLUMNS = ", ".join(OTHER_COLUMNS.get(field.name, f"jobs.{field.name}") for field in fields(Job))

FROM_JOBS = """
      FROM vectormill.jobs
      LEFT JOIN vectormill.generations ON generations.id = jobs.generation_id
      LEFT JOIN vectormill.collections ON collections.id = generations.collection_id
      LEFT JOIN vectormill.job_outputs ON job_outputs.id = jobs.id
      LEFT JOIN vectormill.job_inputs ON job_inputs.id = jobs.id
"""

# A job that is being deleted is hidden from readers: see deletion.py.
FIND_JOB = text(f"SELECT {JOB_COLUMNS} {FROM_JOBS} WHERE jobs.id = :job_id AND jobs.state <> 'deleting'")

LIST_JOBS_BY_ID = text("""
    SELECT id FROM vectormill.jobs WHERE id BETWEEN :least AND :most AND state <> 'deleting' ORDER BY id LIMIT :limit
""")

LIST_JOBS = f"""
    SELECT {JOB_COLUMNS} {FROM_JOBS}
     WHERE jobs.seq < :before_seq AND jobs.state <> 'deleting'
"""
LIST_GENERATIONS: Final = text("""
    SELECT generations.id FROM vectormill.generations
      JOIN vectormill.collections ON collections.id = generations.collection_id WHERE collections.name = :collection
""")
# Each part is added if it is asked for, so that the planner knows what it selects by; with a query in place of the ids
# of generations it read all newer jobs to find those of a small collection. Jobs get their seq in the order of their
# submission, if not to the second, so an hour beside the days bounds what is read.
SELECTIONS: Final = {
    "generations": " AND jobs.generation_id = ANY(CAST(:generations AS bigint[]))",
    "since": """
       AND jobs.created_at >= :since
       AND jobs.seq >= coalesce((
           SELECT seq FROM vectormill.jobs WHERE created_at < CAST(:since AS timestamptz) - interval '1 hour'
            ORDER BY created_at DESC LIMIT 1), 0)
""",
    "until": """
       AND jobs.created_at < :until
       AND jobs.seq <= coalesce((
           SELECT seq FROM vectormill.jobs WHERE created_at >= CAST(:until AS timestamptz) + interval '1 hour'
            ORDER BY created_at LIMIT 1), :before_seq)
""",
    # Comparing pairs makes the planner read ix_jobs_state_seq. It read through all newer jobs of other states when it
    # took this state for a frequent one.
    "state": " AND jobs.state >= :state AND (jobs.state, jobs.seq) < (:state, CAST(:before_seq AS bigint))",
}
NEWEST_FIRST = " ORDER BY jobs.seq DESC LIMIT :limit"
NEWEST_OF_STATE_FIRST = " ORDER BY jobs.state DESC, jobs.seq DESC LIMIT :limit"

_MAX_SEQ = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ItemError:
    """An item of a job without a vector, and the reason. `item` is its position in the job, from 0."""

    item: int
    key: str
    code: str
    detail: str


def find_job(connection: Connection, job_id: UUID) -> Job:
    """Return the current state of a job. Raise JobNotFound."""
    row = connection.execute(FIND_JOB, {"job_id": job_id}).one_or_none()
    if row is None:
        raise JobNotFound
    return _job(row)


def list_jobs(
    connection: Connection,
    *,
    state: str | None = None,
    collection: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    before_seq: int | None = None,
    limit: int,
) -> list[Job]:
    """List the newest jobs with a seq below `before_seq`, the newest first.

    They are in this state, write to this collection, and were submitted from `since` on and before `until`. This is a
    keyset page, so a late page is as cheap as the first.
    """
    generations = None
    if collection is not None:
        generations = list(connection.execute(LIST_GENERATIONS, {"collection": collection}).scalars())
    given = {"generations": generations, "since": since, "until": until, "state": state}
    selected = {name: value for name, value in given.items() if value is not None}
    parts, order = SELECTIONS, NEWEST_FIRST if state is None else NEWEST_OF_STATE_FIRST
    if generations is not None:  # a collection may have few jobs of a state of which others have many
        parts, order = {**SELECTIONS, "state": " AND jobs.state = :state"}, NEWEST_FIRST
    statement = text(LIST_JOBS + "".join(parts[name] for name in selected) + order)
    values = {"before_seq": _MAX_SEQ if before_seq is None else before_seq, "limit": limit, **selected}
    return [_job(row) for row in connection.execute(statement, values)]


def _job(row: Row[Any]) -> Job:
    values = dict(row._mapping)
    return Job(**{**values, "spec": EncodingSpec.from_json(values["spec"])})


PAUSE_JOB = text("""
    UPDATE vectormill.jobs SET state = 'paused', paused_at = now(), updated_at = now() WHERE id = :job_id
""")

# Used when a pause ends, and when a job that had ended is retried. Time before the first dispatch does not
# count as elapsed, so it does not count as idle either.
COUNT_IDLE_SECONDS = text("""
    UPDATE vectormill.jobs
       SET paused_at = NULL,
           idle_seconds = idle_seconds + CASE WHEN started_at IS NULL THEN 0 ELSE
               coalesce(extract(epoch FROM now() - coalesce(finished_at, paused_at)), 0) END
     WHERE id = :job_id
""")

RESUME_JOB = text("UPDATE vectormill.jobs SET state = :state, updated_at = now() WHERE id = :job_id")


def pause_job(connection: Connection, job_id: UUID) -> Job:
    """Stop dispatching a job's chunks; those at workers are finished. A paused job stays paused.

    Raise JobNotFound, or WrongJobState if the job has ended, is being cancelled or is still being received.
    """
    job = lock_job(connection, job_id)
    if job.state == state_after_pause(job.state):
        return job
    connection.execute(PAUSE_JOB, {"job_id": job_id})
    # Messages of these chunks can no longer claim anything, because the job is paused.
    connection.execute(RECALL_CHUNKS, {"job_id": job_id})
    return find_job(connection, job_id)


def resume_job(connection: Connection, job_id: UUID) -> Job:
    """Resume a paused job; a queued or running job stays as it is.

    Raise JobNotFound, or WrongJobState if the job has ended, is being cancelled or is still being received.
    """
    job = lock_job(connection, job_id)
    state = state_after_resume(job.state, has_started=job.started_at is not None)
    if job.state == state:
        return job
    # A dispatch that began before the pause may have marked some since.
    connection.execute(RECALL_CHUNKS, {"job_id": job_id})
    connection.execute(COUNT_IDLE_SECONDS, {"job_id": job_id})
    connection.execute(RESUME_JOB, {"job_id": job_id, "state": state})
    connection.execute(WAKE_DISPATCHER)
    return find_job(connection, job_id)


# None of its chunks was dispatched or counted yet; they are removed with the job.
CANCEL_READING = text("""
    UPDATE vectormill.jobs SET state = 'cancelled', finished_at = now(), updated_at = now()
     WHERE id = :job_id AND state = 'uploading'
""")


CANCEL_JOB = text("UPDATE vectormill.jobs SET state = 'cancelling', updated_at = now() WHERE id = :job_id")


def cancel_job(connection: Connection, job_id: UUID) -> Job:
    """Cancel a job; vectors that are already committed stay. A cancelled job stays cancelled.

    Raise JobNotFound, or WrongJobState if the job has ended otherwise or its client is still sending it.
    """
    # Before the job's row is locked, because the indexer that reads the input locks both in this order.
    if cancel_input(connection, job_id):
        connection.execute(CANCEL_READING, {"job_id": job_id})
    job = lock_job(connection, job_id)
    if job.state == state_after_cancel(job.state):
        return job
    if job.state == PAUSED:
        connection.execute(COUNT_IDLE_SECONDS, {"job_id": job_id})
    # Chunks that no worker holds end at once; a leased one ends when its worker learns of the cancellation, at its next
    # heartbeat. A locked chunk is being claimed or dispatched: its worker learns of it as well, or the reaper ends it.
    connection.execute(CANCEL_JOB, {"job_id": job_id})
    connection.execute(CANCEL_WAITING_CHUNKS, {"job_id": job_id})
    add_up_job(connection, job_id)
    return find_job(connection, job_id)


FIND_REPLACED = text(f"""
    SELECT generations.state, (SELECT id FROM vectormill.jobs AS twin WHERE twin.twin_of = jobs.id
                                ORDER BY twin.seq DESC LIMIT 1) AS twin_id
      FROM vectormill.jobs JOIN vectormill.generations ON generations.id = jobs.generation_id
     WHERE jobs.id = :job_id AND generations.state IN {FORMER_GENERATION_STATES}
""")


# A job without a collection has vectors stored with its chunks as soon as one of its items is done, unless they go into
# object storage.
HAS_LOST_COLLECTION = text("""
    SELECT EXISTS (
        SELECT 1 FROM vectormill.jobs
         WHERE id = :job_id AND generation_id IS NULL AND num_done > 0
           AND NOT EXISTS (SELECT 1 FROM vectormill.job_outputs WHERE job_outputs.id = jobs.id)
           AND NOT EXISTS (SELECT 1 FROM vectormill.chunks
                             JOIN vectormill.chunk_vectors AS own ON own.chunk_id = chunks.id
                            WHERE chunks.job_id = jobs.id))
""")


def has_lost_collection(connection: Connection, job_id: UUID) -> bool:
    """Return whether the job's vectors were in a collection that has since been deleted."""
    is_so: bool = connection.execute(HAS_LOST_COLLECTION, {"job_id": job_id}).scalar_one()
    return is_so


def _refuse_replaced(connection: Connection, job: Job) -> None:
    if job.collection is None and job.num_done and has_lost_collection(connection, job.id):
        raise WrongJobState(
            "The job wrote to a collection that has since been deleted; submit its items again."
        )
    row = connection.execute(FIND_REPLACED, {"job_id": job.id}).one_or_none()
    if row is None:
        return
    advice = f"retry its twin {row.twin_id}" if row.twin_id else "submit the failed items again"
    raise WrongJobState(
        f"The job wrote to a generation of collection {job.collection!r} that has since been replaced ({row.state}); "
        f"{advice}."
    )


def retry_job(connection: Connection, job_id: UUID) -> Job:
    """Encode only the failed items of an ended or paused job again. A paused job stays paused.

    Raise JobNotFound, or WrongJobState unless the job ended with failed items, or is paused and has some. Raise
    WrongJobState also if its collection was deleted or its generation was replaced.
    """
    chunk_ids = connection.execute(LOCK_FAILED_CHUNKS, {"job_id": job_id}).scalars().all()
    job = lock_job(connection, job_id)
    _refuse_replaced(connection, job)
    state_after_retry(job.state, job.num_failed)
    if job.is_terminal:
        connection.execute(COUNT_IDLE_SECONDS, {"job_id": job_id})
        reopen_output(connection, job_id)
    connection.execute(RETRY_FAILED_ITEMS, {"job_id": job_id, "chunk_ids": chunk_ids})
    add_up_job(connection, job_id)
    connection.execute(WAKE_DISPATCHER)
    return find_job(connection, job_id)


DRAW_SEQ = text("""
    SELECT nextval(pg_get_serial_sequence('vectormill.jobs', 'seq'))
""")


def draw_seq(connection: Connection) -> int:
    """Draw a seq, which orders writers: after all jobs submitted before, and before all that come later."""
    seq: int = connection.execute(DRAW_SEQ).scalar_one()
    return seq


def lock_job(connection: Connection, job_id: UUID) -> Job:
    """Lock the job's row until the transaction ends, and return the job with all chunks counted that have ended.

    Raise JobNotFound.
    """
    connection.execute(
        text("SELECT 1 FROM vectormill.jobs WHERE id = :job_id FOR NO KEY UPDATE"), {"job_id": job_id}
    )
    add_up_job(connection, job_id)
    return find_job(connection, job_id)


# Chunks are locked before the job, in the same order as in a commit; otherwise the two transactions could
# deadlock.
LOCK_CHUNKS = text("SELECT 1 FROM vectormill.chunks WHERE job_id = :job_id ORDER BY id FOR UPDATE")


def delete_job(connection: Connection, job_id: UUID) -> None:
    """Delete a small job at once, whatever its state, such as the samples of a check.

    Other jobs are deleted in batches: see deletion.py.
    """
    connection.execute(LOCK_CHUNKS, {"job_id": job_id})
    connection.execute(text("DELETE FROM vectormill.jobs WHERE id = :job_id"), {"job_id": job_id})


LIST_ITEM_ERRORS = text("""
    SELECT item, key, code, detail FROM vectormill.item_errors
     WHERE job_id = :job_id AND item > :after ORDER BY item LIMIT :limit
""")


def list_item_errors(
    connection: Connection, job_id: UUID, *, after: int | None, limit: int
) -> list[ItemError]:
    """List the errors of a job's items in item order, from after position `after` on; a keyset page."""
    values = {"job_id": job_id, "after": -1 if after is None else after, "limit": limit}
    return [ItemError(*row) for row in connection.execute(LIST_ITEM_ERRORS, values)]


# Jobs are pruned after a while, and generations last as long as their collection. Both tables are small beside items,
# and a process asks once for each model whose files have a flaw.
IS_IN_USE: Final = text(
    """
    SELECT EXISTS (SELECT FROM vectormill.generations WHERE spec ->> 'model' = :model)
        OR EXISTS (SELECT FROM vectormill.jobs WHERE spec ->> 'model' = :model)
    """
)


def is_model_in_use(engine: Engine, model: str) -> bool:
    """Return True if there is a job or a collection of the model."""
    with engine.connect() as connection:
        return bool(connection.execute(IS_IN_USE, {"model": model}).scalar_one())
