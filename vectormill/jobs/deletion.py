"""Delete jobs: a short transaction hides a job from readers, and the pruner removes its rows in batches.

In between the job's state is `deleting`: find_job and list_jobs skip it, and its Idempotency-Key is free. A
pruner that is killed between batches loses nothing; the next one continues. Rows in collections stay.
"""

from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, text

from vectormill.domain.errors import JobNotFound, WrongJobState
from vectormill.jobs.dual_writes import OWES_TWIN
from vectormill.jobs.job import COMPLETED, COMPLETED_WITH_ERRORS, UPLOADING, Job, state_after_delete
from vectormill.jobs.jobs import find_job, lock_job
from vectormill.objects.output import CLOSING, DUE_OUTPUT_STATES, ENDED
from vectormill.runs.run import OPEN_RUN_STATES
from vectormill.workers.proofs import IS_UNPROVEN

# From then on no reader finds the job, and its Idempotency-Key is free.
_DISCARD: Final = "UPDATE vectormill.jobs SET state = 'deleting', idempotency_key = NULL, updated_at = now()"
_DISCARD_UPLOAD: Final = f"{_DISCARD}, finished_at = now()"
_IS_UPLOAD: Final = "state = 'uploading' AND content_hash IS NULL"

DISCARD_JOB = text(f"{_DISCARD} WHERE id = :job_id")

FIND_OWED_TWIN = text(f"SELECT 1 FROM vectormill.jobs WHERE id = :job_id AND {OWES_TWIN}")


def discard_job(connection: Connection, job_id: UUID) -> None:
    """Hide an ended job from readers and mark it for removal.

    Raise JobNotFound, or WrongJobState if the job has not ended or its output is still being closed: no reader would
    ever see its rows. Raise it also if a run has yet to copy the job. An output that cannot be closed, and that of a
    cancelled job, are no reason to keep the job.
    """
    job = lock_job(connection, job_id)
    state_after_delete(job.state)
    is_closing = job.output_state in (ENDED, CLOSING) and job.output_error is None
    if is_closing and job.state in (COMPLETED, COMPLETED_WITH_ERRORS):
        raise WrongJobState(
            "The results of the job are not in its output yet; delete it when the state of its output is closed."
        )
    if connection.execute(FIND_OWED_TWIN, {"job_id": job_id}).one_or_none() is not None:
        raise WrongJobState(
            "The items of the job are yet to be written to the generation of its collection that is being built; "
            "delete it when the run that builds it has ended, or when that generation was discarded."
        )
    connection.execute(DISCARD_JOB, {"job_id": job_id})


# Only a job that is still an upload is removed. After a COMMIT whose reply was lost the writer believes that
# it failed, while the job is queued, and perhaps already reported to a client that sent it again. If that
# COMMIT is still in progress, this statement waits for its row lock and then finds a queued job. The seq is
# free again, so that a run which tries once more can use it. A job whose objects an indexer reads is no upload any
# more: it has its content hash from the beginning, and no client that could fall silent.
DISCARD_UPLOAD = text(f"{_DISCARD_UPLOAD}, seq = DEFAULT WHERE id = :job_id AND {_IS_UPLOAD}")


def discard_upload(connection: Connection, job_id: UUID) -> None:
    """Remove what a submission has written so far, unless the job was completed meanwhile."""
    connection.execute(DISCARD_UPLOAD, {"job_id": job_id})


def settle_upload(connection: Connection, job_id: UUID) -> Job | None:
    """Return the job if an earlier attempt has submitted all of it; else remove what it has written."""
    discard_upload(connection, job_id)
    try:
        job = find_job(connection, job_id)
    except JobNotFound:
        return None
    return None if job.state == UPLOADING else job


# This frees the Idempotency-Key of an upload whose client has been silent for too long.
DISCARD_SILENT_UPLOAD = text(f"""
    {_DISCARD_UPLOAD}
     WHERE idempotency_key = :key AND {_IS_UPLOAD} AND updated_at < now() - make_interval(secs => :timeout)
""")


DISCARD_STALE_UPLOADS = text(f"""
    {_DISCARD_UPLOAD}, seq = DEFAULT
     WHERE {_IS_UPLOAD} AND updated_at < now() - make_interval(secs => :timeout)
    RETURNING id
""")

# This condition holds for an ended job that is kept because something is yet to be made of it: the parts and the
# manifest of its output, however often writing them has failed; its twin; what a run does once its job has ended; the
# file of answers of a batch, for as long as the file is kept; the removal of former rows whose new text failed in a
# followed table; and the repair of what an unproven worker has committed. A cancelled job owes no output and no twin.
IS_OWED: Final = f"""(
    jobs.state <> 'cancelled' AND EXISTS (SELECT 1 FROM vectormill.job_outputs AS output
                                           WHERE output.id = jobs.id AND output.state IN {DUE_OUTPUT_STATES})
    OR {OWES_TWIN}
    OR EXISTS (SELECT 1 FROM vectormill.runs WHERE runs.job_id = jobs.id AND runs.state IN {OPEN_RUN_STATES})
    OR EXISTS (SELECT 1 FROM vectormill.request_batches AS batch
                WHERE batch.job_id = jobs.id
                  AND (batch.finished_at IS NULL
                       OR EXISTS (SELECT 1 FROM vectormill.request_files AS file
                                   WHERE file.id = batch.output_file_id AND file.state = 'processed')))
    OR jobs.forget_at = 'infinity' AND jobs.num_failed > 0 AND jobs.metadata ? 'changes_of'
    OR {IS_UNPROVEN}
) IS TRUE"""

# Rows are locked first, so that a job which is being retried at this moment is skipped.
DISCARD_EXPIRED_JOBS = text(f"""
    {_DISCARD}
     WHERE id IN (
        SELECT id FROM vectormill.jobs
         WHERE finished_at < now() - make_interval(secs => :retention) AND state <> 'deleting' AND NOT {IS_OWED}
         ORDER BY finished_at LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING id
""")


def discard_stale_uploads(connection: Connection, timeout_seconds: float) -> int:
    """Discard uploads whose client has been silent for longer than the time-out.

    Return the number of uploads.
    """
    return len(connection.execute(DISCARD_STALE_UPLOADS, {"timeout": timeout_seconds}).all())


def discard_expired_jobs(connection: Connection, retention_seconds: float, limit: int = 1000) -> int:
    """Discard ended jobs past their retention, the oldest first. Return the number of jobs."""
    values = {"retention": retention_seconds, "limit": limit}
    return len(connection.execute(DISCARD_EXPIRED_JOBS, values).all())


# The API removes the job of a put after it has answered, unless it was killed or has told the client the
# job's address. A job that has not ended is never discarded, because its text is stored nowhere else.
DISCARD_ENDED_PUTS = text(f"""
    {_DISCARD}
     WHERE id IN (
        SELECT id FROM vectormill.jobs
         WHERE forget_at = 'infinity' AND finished_at < now() - make_interval(secs => :kept_seconds)
           AND state <> 'deleting' AND NOT {IS_OWED}
         LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING id
""")

# For this long a client may ask for the outcome of a put that it did not wait for.
PUT_KEPT_SECONDS: Final = 600.0


def discard_ended_puts(
    connection: Connection, kept_seconds: float = PUT_KEPT_SECONDS, limit: int = 1000
) -> int:
    """Discard jobs of puts that ended more than `kept_seconds` ago. Return the number of jobs."""
    values = {"kept_seconds": float(kept_seconds), "limit": limit}
    return len(connection.execute(DISCARD_ENDED_PUTS, values).all())


# The row is locked until the batch is done, so that two pruners never work on one job. Unlike elsewhere the
# job is locked before its chunks, so a chunk that somebody else holds, such as the recomputation, is left to a later
# batch.
FIND_DISCARDED_JOB = text("""
    SELECT id, seq FROM vectormill.jobs WHERE state = 'deleting' AND seq > :after_seq
     ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED
""")

# The payloads, vectors and truncations of the chunks are dropped or deleted later: see partitions.py.
DELETE_CHUNKS = text("""
    DELETE FROM vectormill.chunks WHERE id IN (
        SELECT id FROM vectormill.chunks WHERE job_id = :job_id ORDER BY seq LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING 1
""")

DELETE_ERRORS = text("""
    DELETE FROM vectormill.item_errors WHERE job_id = :job_id AND item IN (
        SELECT item FROM vectormill.item_errors WHERE job_id = :job_id ORDER BY item LIMIT :limit)
    RETURNING 1
""")

DELETE_EMPTY_JOB = text("""
    DELETE FROM vectormill.jobs WHERE id = :job_id AND NOT EXISTS (
        SELECT FROM vectormill.chunks WHERE job_id = :job_id)
""")


def lock_discarded_job(connection: Connection, after_seq: int = 0) -> Row[Any] | None:
    """Lock the next discarded job after `after_seq`, or else the first one.

    Return its id and seq, or None if no job is discarded.
    """
    for after in (after_seq, 0):
        row = connection.execute(FIND_DISCARDED_JOB, {"after_seq": after}).one_or_none()
        if row is not None:
            return row
    return None


def delete_chunks(connection: Connection, job_id: UUID, limit: int) -> int:
    """Delete the first chunks of a job that nobody else writes, at most `limit`; return their number."""
    return len(connection.execute(DELETE_CHUNKS, {"job_id": job_id, "limit": limit}).all())


def delete_batch(connection: Connection, job_id: UUID, max_chunks: int, max_errors: int) -> bool:
    """Delete at most this many chunks and errors of a locked, discarded job.

    Return True if the job itself was deleted too, False if rows of it remain.
    """
    num_chunks = delete_chunks(connection, job_id, max_chunks)
    num_errors = len(connection.execute(DELETE_ERRORS, {"job_id": job_id, "limit": max_errors}).all())
    if num_chunks == max_chunks or num_errors == max_errors:
        return False
    return connection.execute(DELETE_EMPTY_JOB, {"job_id": job_id}).rowcount == 1


# Chunks are locked before their jobs, in the same order as in a commit. A locked chunk is being committed and
# is left to the next round; a worker that holds its chunk without a lock loses the lease.
LOCK_FORGOTTEN_CHUNKS = text("""
    SELECT chunk.job_id FROM vectormill.chunks AS chunk JOIN vectormill.jobs AS job ON job.id = chunk.job_id
     WHERE job.forget_at < now() LIMIT 1000 FOR UPDATE OF chunk SKIP LOCKED
""")

DELETE_FORGOTTEN_QUERIES = text("""
    DELETE FROM vectormill.jobs WHERE id IN (
        SELECT id FROM vectormill.jobs AS job
         WHERE forget_at < now()
           AND (id = ANY(CAST(:job_ids AS uuid[]))
                OR NOT EXISTS (SELECT 1 FROM vectormill.chunks WHERE job_id = job.id))
           FOR UPDATE SKIP LOCKED)
    RETURNING id
""")


def delete_forgotten_queries(connection: Connection) -> int:
    """Delete one-chunk jobs past their lifetime: samples of a check whose indexer was killed.

    Return the number of jobs.
    """
    job_ids = list(connection.execute(LOCK_FORGOTTEN_CHUNKS).scalars())
    return len(connection.execute(DELETE_FORGOTTEN_QUERIES, {"job_ids": job_ids}).all())


DELETE_DEAD_WORKERS = text("""
    DELETE FROM vectormill.workers WHERE heartbeat_at < now() - interval '1 day' RETURNING name
""")


def delete_dead_workers(connection: Connection) -> int:
    """Delete workers that have been silent for a day. Return the number of workers."""
    return len(connection.execute(DELETE_DEAD_WORKERS).all())
