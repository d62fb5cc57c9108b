"""Recover from failures: expired leases, lost dispatches, unfinished jobs, and chunks of ended processes."""

from uuid import UUID

from sqlalchemy import Connection, Engine, text

from vectormill.jobs.chunk import IS_LEASED, UNCLAIMED_CHUNK_STATES, Claim
from vectormill.jobs.job import RECEIVED_JOB_STATES

# A lapse says nothing about the texts: the database was away, a lock was waited for, or a host was cut off.
# So it counts neither as an attempt nor as a loss, and the whole chunk runs again. The backoff doubles with
# every lapse, up to a minute.
RESCUE_EXPIRED = text("""
    WITH expired AS (
        SELECT id FROM vectormill.chunks WHERE state = 'leased' AND lease_until < now()
         ORDER BY lease_until LIMIT 1000 FOR UPDATE SKIP LOCKED
    ), rescued AS (
        UPDATE vectormill.chunks AS chunk
           SET state = 'pending', lapsed = lapsed + 1, attempt = greatest(attempt - 1, 0),
               lease_owner = NULL, lease_until = NULL,
               error = 'the worker ' || coalesce(lease_owner, '?') || ' stopped renewing its lease',
               available_at = now() + make_interval(secs => least(60, power(2, least(lapsed, 6)) - 1))
          FROM expired WHERE chunk.id = expired.id
        RETURNING chunk.id, chunk.job_id
    ), counted AS (
        UPDATE vectormill.jobs SET num_retried_chunks = num_retried_chunks + by_job.count
          FROM (SELECT job_id, count(*) FROM rescued GROUP BY job_id) AS by_job WHERE jobs.id = by_job.job_id
    )
    SELECT id FROM rescued
""")

RESCUE_UNCLAIMED = text("""
    WITH unclaimed AS (
        SELECT id FROM vectormill.chunks
         WHERE state = 'queued' AND queued_at < now() - make_interval(secs => :timeout)
         ORDER BY queued_at LIMIT :limit FOR UPDATE SKIP LOCKED
    )
    UPDATE vectormill.chunks AS chunk SET state = 'pending', available_at = now()
      FROM unclaimed WHERE chunk.id = unclaimed.id
    RETURNING chunk.id
""")


def read_clock(connection: Connection) -> float:
    """Return the database's clock, by which leases expire, in seconds."""
    return float(connection.execute(text("SELECT extract(epoch FROM now())::float8")).scalar_one())


def rescue_expired_chunks(connection: Connection) -> int:
    """Make chunks whose lease has expired `pending` again, and count a lapse for each.

    Return the number of chunks.
    """
    return len(connection.execute(RESCUE_EXPIRED).all())


def rescue_unclaimed_chunks(connection: Connection, timeout_seconds: float, limit: int = 1000) -> int:
    """Make dispatched chunks that nobody claimed in time `pending` again. Return the number of chunks.

    Their message was lost, or no worker consumes the queue.
    """
    return len(connection.execute(RESCUE_UNCLAIMED, {"timeout": timeout_seconds, "limit": limit}).all())


# A dispatch that began before a pause may end after it. Its message can claim nothing, so the chunk would
# look as if the message had been lost.
RECALL_PAUSED = text("""
    WITH dispatched AS (
        SELECT chunk.id FROM vectormill.chunks AS chunk JOIN vectormill.jobs AS job ON job.id = chunk.job_id
         WHERE job.state = 'paused' AND chunk.state = 'queued'
           FOR NO KEY UPDATE OF chunk SKIP LOCKED
    )
    UPDATE vectormill.chunks AS chunk SET state = 'pending', available_at = now()
      FROM dispatched WHERE chunk.id = dispatched.id
    RETURNING chunk.id
""")


def recall_paused_chunks(connection: Connection) -> int:
    """Make dispatched chunks of paused jobs `pending` again."""
    return len(connection.execute(RECALL_PAUSED).all())


# These are chunks that became pending again while their job was being cancelled.
END_CANCELLING = text(f"""
    WITH waiting AS (
        SELECT chunk.id FROM vectormill.chunks AS chunk JOIN vectormill.jobs AS job ON job.id = chunk.job_id
         WHERE job.state = 'cancelling' AND chunk.state IN {UNCLAIMED_CHUNK_STATES}
           FOR NO KEY UPDATE OF chunk SKIP LOCKED
    ), ended AS (
        UPDATE vectormill.chunks AS chunk SET state = 'cancelled'
          FROM waiting WHERE chunk.id = waiting.id
        RETURNING chunk.job_id
    )
    UPDATE vectormill.jobs
       SET num_open_chunks = num_open_chunks - by_job.count, updated_at = now(),
           state = CASE WHEN num_open_chunks = by_job.count THEN 'cancelled' ELSE state END,
           finished_at = CASE WHEN num_open_chunks = by_job.count THEN now() END
      FROM (SELECT job_id, count(*)::int FROM ended GROUP BY job_id) AS by_job
     WHERE jobs.id = by_job.job_id
    RETURNING finished_at
""")

# The transaction that brings the counter of open chunks to zero also ends the job. This statement ends jobs for
# which that did not happen, which no code path should cause. It reads all open jobs, so it is run rarely.
END_FINISHED = text(f"""
    UPDATE vectormill.jobs
       SET finished_at = now(), updated_at = now(),
           state = CASE WHEN state = 'cancelling' THEN 'cancelled'
                        WHEN num_failed = 0 THEN 'completed'
                        WHEN num_done = 0 THEN 'failed'
                        ELSE 'completed_with_errors' END
     WHERE state IN {RECEIVED_JOB_STATES} AND num_open_chunks = 0
    RETURNING id
""")


def end_cancelled_jobs(connection: Connection) -> int:
    """End pending chunks of jobs that are being cancelled. Return the number of jobs that have ended with them."""
    return sum(row.finished_at is not None for row in connection.execute(END_CANCELLING))


def end_finished_jobs(connection: Connection) -> int:
    """End jobs without open chunks that nobody has ended. Return their number."""
    return len(connection.execute(END_FINISHED).all())


MARK_ALONE = text(f"""
    UPDATE vectormill.chunks SET is_alone = true WHERE id = :chunk_id AND fence = :fence AND {IS_LEASED}
""")


def mark_alone(connection: Connection, claim: Claim) -> None:
    """Record that no other chunk is being encoded alongside this one, so that a crash is attributed to it."""
    connection.execute(MARK_ALONE, {"chunk_id": claim.chunk_id, "fence": claim.fence})


# If one chunk was encoded alone, it is to blame, and others that waited for it are not. If several were
# encoded together, any of them may be: they become suspects, and are encoded alone next time. The lease of a
# locked row expires by itself.
RELEASE_ORPHANED = text("""
    WITH held AS (
        SELECT id, is_alone, bool_or(is_alone) OVER () AS is_known
          FROM (SELECT id, is_alone FROM vectormill.chunks
                 WHERE state = 'leased' AND right(lease_owner, 8) = :tag
                   FOR NO KEY UPDATE SKIP LOCKED) AS locked
    ), released AS (
        UPDATE vectormill.chunks AS chunk
           SET state = 'pending', lease_owner = NULL, lease_until = NULL, available_at = now(), error = :reason,
               attempt = greatest(attempt - 1, 0),
               lost = CASE WHEN :is_evidence AND held.is_alone THEN lost + 1
                           WHEN :is_evidence AND NOT held.is_known THEN greatest(lost, 1)
                           ELSE lost END,
               lapsed = lapsed + CASE WHEN :is_evidence THEN 0 ELSE 1 END
          FROM held WHERE chunk.id = held.id
        RETURNING chunk.job_id
    )
    SELECT job_id, count(*) AS num_chunks FROM released GROUP BY job_id
""")

COUNT_RETRIED = text("""
    UPDATE vectormill.jobs SET num_retried_chunks = num_retried_chunks + :num_chunks WHERE id = :job_id
""")


def release_orphaned_chunks(engine: Engine, incarnation: UUID, reason: str, *, is_evidence: bool) -> int:
    """Hand back all chunks that an ended process of a worker held. Return the number of chunks.

    `is_evidence` says that the process ended because of a failure that the texts in progress may have caused.
    Each job's counter is updated in a separate transaction, because only the reaper may lock several jobs at
    once.
    """
    values = {"tag": incarnation.hex[:8], "reason": reason, "is_evidence": is_evidence}
    with engine.begin() as connection:
        released = connection.execute(RELEASE_ORPHANED, values).all()
    for job_id, num_chunks in released:
        with engine.begin() as connection:
            connection.execute(COUNT_RETRIED, {"job_id": job_id, "num_chunks": num_chunks})
    return sum(num_chunks for _, num_chunks in released)
