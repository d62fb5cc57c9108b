"""Deletion of jobs: a short transaction makes a job vanish for readers, and the pruner removes its rows in batches.

In between the job's state is `deleting`: find_job and list_jobs pass over it, its Idempotency-Key is free, and whoever
removes a batch may be killed; the next one goes on. Rows in collections stay.
"""

from typing import Final
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.jobs.job import state_after_delete
from vectormill.jobs.jobs import lock_job

DISCARD_JOB = text("""
    UPDATE vectormill.jobs SET state = :state, idempotency_key = NULL, updated_at = now() WHERE id = :job_id
""")


def discard_job(connection: Connection, job_id: UUID) -> None:
    """Make an ended job vanish. Raise JobNotFound, and WrongJobState for a job that has not ended."""
    job = lock_job(connection, job_id)
    connection.execute(DISCARD_JOB, {"job_id": job_id, "state": state_after_delete(job.state)})


# Only what is still an upload. After a COMMIT whose reply was lost the writer believes that it failed, while the job is
# queued, and perhaps answered to a client that sent it again. A COMMIT that is under way holds the row: this waits
# for it, and then finds a job. Its place in the order of writers is free again: a run that tries once more takes it.
DISCARD_UPLOAD = text("""
    UPDATE vectormill.jobs SET state = 'deleting', idempotency_key = NULL, seq = DEFAULT, finished_at = now(),
           updated_at = now()
     WHERE id = :job_id AND state = 'uploading'
""")


def discard_upload(connection: Connection, job_id: UUID) -> None:
    """Remove what a submission has written so far; a job that was completed meanwhile stays."""
    connection.execute(DISCARD_UPLOAD, {"job_id": job_id})


DISCARD_SILENT_UPLOAD = text("""
    UPDATE vectormill.jobs SET state = 'deleting', idempotency_key = NULL, finished_at = now(), updated_at = now()
     WHERE idempotency_key = :key AND state = 'uploading'
       AND updated_at < now() - make_interval(secs => :timeout)
""")


def discard_silent_upload(connection: Connection, key: str, timeout_seconds: float) -> None:
    """Free the Idempotency-Key of an upload whose client has been silent for so long."""
    connection.execute(DISCARD_SILENT_UPLOAD, {"key": key, "timeout": timeout_seconds})


DISCARD_STALE_UPLOADS = text("""
    UPDATE vectormill.jobs SET state = 'deleting', idempotency_key = NULL, seq = DEFAULT, finished_at = now(),
           updated_at = now()
     WHERE state = 'uploading' AND updated_at < now() - make_interval(secs => :timeout)
    RETURNING id
""")

# Locked first: one that is being retried at this moment is passed over. The output file of a request batch is made of
# its job, which stays as long.
DISCARD_EXPIRED_JOBS = text("""
    UPDATE vectormill.jobs SET state = 'deleting', idempotency_key = NULL, updated_at = now()
     WHERE id IN (
        SELECT id FROM vectormill.jobs
         WHERE finished_at < now() - make_interval(secs => :retention) AND state <> 'deleting'
           AND NOT EXISTS (
               SELECT 1 FROM vectormill.request_batches AS batch
                WHERE batch.job_id = jobs.id
                  AND (batch.finished_at IS NULL
                       OR EXISTS (SELECT 1 FROM vectormill.request_files AS file
                                   WHERE file.id = batch.output_file_id AND file.state = 'processed')))
         ORDER BY finished_at LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING id
""")


def discard_stale_uploads(connection: Connection, timeout_seconds: float) -> int:
    """Discard uploads whose client has been silent for long. Return how many."""
    return len(connection.execute(DISCARD_STALE_UPLOADS, {"timeout": timeout_seconds}).all())


def discard_expired_jobs(connection: Connection, retention_seconds: float, limit: int = 1000) -> int:
    """Discard ended jobs past their retention, the oldest first. Return how many."""
    values = {"retention": retention_seconds, "limit": limit}
    return len(connection.execute(DISCARD_EXPIRED_JOBS, values).all())


# Jobs of puts: an API removes their jobs when it has answered, unless it was killed, or has told the client where its
# job is. Never one that has not ended, whatever time that takes: its text is nowhere else. Nor one of a followed
# table with items that failed: the follower removes their former rows first, and then keeps the job as any other.
DISCARD_ENDED_PUTS = text("""
    UPDATE vectormill.jobs SET state = 'deleting', idempotency_key = NULL, updated_at = now()
     WHERE id IN (
        SELECT id FROM vectormill.jobs
         WHERE forget_at = 'infinity' AND finished_at < now() - make_interval(secs => :kept_seconds)
           AND state <> 'deleting' AND NOT (num_failed > 0 AND metadata ? 'changes_of')
         LIMIT :limit FOR UPDATE SKIP LOCKED)
    RETURNING id
""")

# So long a client may ask what became of a put that it did not wait for.
PUT_KEPT_SECONDS: Final = 600.0


def discard_ended_puts(
    connection: Connection, kept_seconds: float = PUT_KEPT_SECONDS, limit: int = 1000
) -> int:
    """Discard jobs of puts that ended so long ago. Return how many."""
    values = {"kept_seconds": float(kept_seconds), "limit": limit}
    return len(connection.execute(DISCARD_ENDED_PUTS, values).all())


# Locked until the batch is through, so that two pruners never work on one job. The job before its chunks, unlike
# elsewhere: nobody else comes to the chunks of a job that has ended.
FIND_DISCARDED_JOB = text("""
    SELECT id FROM vectormill.jobs WHERE state = 'deleting' ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED
""")

# Payloads, own vectors and truncations go with their chunk.
DELETE_CHUNKS = text("""
    DELETE FROM vectormill.chunks WHERE id IN (
        SELECT id FROM vectormill.chunks WHERE job_id = :job_id ORDER BY seq LIMIT :limit)
    RETURNING 1
""")

DELETE_ERRORS = text("""
    DELETE FROM vectormill.item_errors WHERE job_id = :job_id AND item IN (
        SELECT item FROM vectormill.item_errors WHERE job_id = :job_id ORDER BY item LIMIT :limit)
    RETURNING 1
""")

DELETE_EMPTY_JOB = text("""
    DELETE FROM vectormill.jobs WHERE id = :job_id
""")


def delete_batch(connection: Connection, max_chunks: int, max_errors: int) -> bool | None:
    """Delete at most so much of a discarded job. Return whether the job is gone with it; None when there is none."""
    job_id = connection.execute(FIND_DISCARDED_JOB).scalar_one_or_none()
    if job_id is None:
        return None
    num_chunks = len(connection.execute(DELETE_CHUNKS, {"job_id": job_id, "limit": max_chunks}).all())
    num_errors = len(connection.execute(DELETE_ERRORS, {"job_id": job_id, "limit": max_errors}).all())
    if num_chunks == max_chunks or num_errors == max_errors:
        return False
    connection.execute(DELETE_EMPTY_JOB, {"job_id": job_id})
    return True


# Chunks before their jobs, as whoever commits one has them. A locked one is being committed, and waits for the next
# round; a worker that holds its chunk otherwise loses the lease.
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
    """Delete jobs of one chunk whose lifetime is over: samples of a check whose indexer was killed. Return how many."""
    job_ids = list(connection.execute(LOCK_FORGOTTEN_CHUNKS).scalars())
    return len(connection.execute(DELETE_FORGOTTEN_QUERIES, {"job_ids": job_ids}).all())


DELETE_DEAD_WORKERS = text("""
    DELETE FROM vectormill.workers WHERE heartbeat_at < now() - interval '1 day' RETURNING name
""")


def delete_dead_workers(connection: Connection) -> int:
    """Delete workers that have been silent for a day. Return how many."""
    return len(connection.execute(DELETE_DEAD_WORKERS).all())
