"""Claims of request batches: an indexer holds one by a lease while it reads its lines or finishes its answers.

What it writes is under the fence of its claim. A batch stays in its state when its indexer dies; whoever claims it
after the lease does that step again from its beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.db.jsonb import to_jsonb
from vectormill.db.requests.batches import find_batch, stop_job
from vectormill.domain.errors import LeaseLost
from vectormill.domain.requests.request_batch import BatchFault, RequestBatch


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """A batch as it was claimed, and what proves that it is still ours."""

    batch: RequestBatch
    lease_seconds: float


# A batch in progress is nobody's matter until its job has ended, whoever ended it.
CLAIM_BATCH = text("""
    WITH candidate AS (
        SELECT batch.id
          FROM vectormill.request_batches AS batch
         WHERE batch.state IN ('validating', 'in_progress', 'finalizing', 'cancelling')
           AND batch.available_at <= now() AND (batch.lease_until IS NULL OR batch.lease_until <= now())
           AND (batch.state IN ('validating', 'finalizing')
                OR NOT EXISTS (SELECT 1 FROM vectormill.jobs AS job
                                WHERE job.id = batch.job_id
                                  AND job.state IN ('queued', 'running', 'paused', 'cancelling')))
         ORDER BY batch.seq
         LIMIT 1
           FOR NO KEY UPDATE OF batch SKIP LOCKED
    )
    UPDATE vectormill.request_batches AS batch
       SET fence = batch.fence + 1, lease_owner = :owner,
           attempt = CASE WHEN batch.state = 'in_progress' THEN 1 ELSE batch.attempt + 1 END,
           state = CASE WHEN batch.state = 'in_progress' THEN 'finalizing' ELSE batch.state END,
           finalizing_at = CASE WHEN batch.state = 'in_progress' THEN now() ELSE batch.finalizing_at END,
           lease_until = now() + make_interval(secs => CAST(:lease_seconds AS double precision)), updated_at = now()
      FROM candidate
     WHERE batch.id = candidate.id
    RETURNING batch.id
""")


def claim_batch(connection: Connection, owner: str, lease_seconds: float) -> BatchClaim | None:
    """The oldest batch for which there is something to do, or None."""
    values = {"owner": owner, "lease_seconds": float(lease_seconds)}
    batch_id = connection.execute(CLAIM_BATCH, values).scalar_one_or_none()
    return None if batch_id is None else BatchClaim(find_batch(connection, batch_id), lease_seconds)


# The first statement of every transaction that writes for a batch: it locks the batch until COMMIT.
KEEP_BATCH = text("""
    UPDATE vectormill.request_batches
       SET lease_until = now() + make_interval(secs => CAST(:lease_seconds AS double precision)), updated_at = now()
     WHERE id = :batch_id AND fence = :fence AND state = :state
    RETURNING 1
""")


def keep_batch(connection: Connection, claim: BatchClaim) -> None:
    """Renews the lease. Raises LeaseLost: another may hold the batch, or its client cancelled it."""
    values = {
        "batch_id": claim.batch.id,
        "fence": claim.batch.fence,
        "state": claim.batch.state,
        "lease_seconds": float(claim.lease_seconds),
    }
    if connection.execute(KEEP_BATCH, values).one_or_none() is None:
        raise LeaseLost("The batch was cancelled, or its lease expired and another indexer may hold it.")


NOTE_JOB = text("UPDATE vectormill.request_batches SET job_id = :job_id WHERE id = :batch_id")
FORGET_REFUSALS = text("DELETE FROM vectormill.request_refusals WHERE batch_id = :batch_id")


def begin_reading(connection: Connection, claim: BatchClaim, job_id: UUID) -> None:
    """Notes the job before anything of it is written, and forgets what an earlier attempt refused. Raises LeaseLost."""
    keep_batch(connection, claim)
    connection.execute(NOTE_JOB, {"batch_id": claim.batch.id, "job_id": job_id})
    connection.execute(FORGET_REFUSALS, {"batch_id": claim.batch.id})


BEGIN_PROGRESS = text("""
    UPDATE vectormill.request_batches
       SET state = 'in_progress', in_progress_at = now(), model = :model, num_lines = :num_lines,
           num_refused = :num_refused, lease_owner = NULL, lease_until = NULL, attempt = 0, updated_at = now()
     WHERE id = :batch_id
""")


def begin_progress(
    connection: Connection, claim: BatchClaim, *, model: str, num_lines: int, num_refused: int
) -> None:
    """In the transaction that queues the job. Raises LeaseLost."""
    keep_batch(connection, claim)
    values = {
        "batch_id": claim.batch.id,
        "model": model,
        "num_lines": num_lines,
        "num_refused": num_refused,
    }
    connection.execute(BEGIN_PROGRESS, values)


FAIL_BATCH = text("""
    UPDATE vectormill.request_batches
       SET state = 'failed', failed_at = now(), finished_at = now(), errors = CAST(:errors AS jsonb),
           num_lines = :num_lines, num_failed = :num_lines, lease_owner = NULL, lease_until = NULL, updated_at = now()
     WHERE id = :batch_id
""")


def fail_batch(
    connection: Connection, claim: BatchClaim, faults: Sequence[BatchFault], num_lines: int = 0
) -> None:
    """Ends a batch of which nothing can be answered. Raises LeaseLost."""
    keep_batch(connection, claim)
    errors = to_jsonb([fault.to_json() for fault in faults])
    connection.execute(FAIL_BATCH, {"batch_id": claim.batch.id, "errors": errors, "num_lines": num_lines})
    connection.execute(FORGET_REFUSALS, {"batch_id": claim.batch.id})


INSERT_OUTPUT = text("""
    INSERT INTO vectormill.request_files (id, state, purpose, filename, num_bytes, batch_id, expires_at)
    VALUES (:id, 'processed', 'batch_output', :filename, :num_bytes, :batch_id,
            now() + make_interval(secs => CAST(:lifetime_seconds AS double precision)))
""")


def add_output(
    connection: Connection, claim: BatchClaim, file_id: UUID, num_bytes: int, lifetime_seconds: float
) -> None:
    """A file whose content is made when it is read."""
    batch = claim.batch
    values = {
        "id": file_id,
        "filename": f"{batch.name}_output.jsonl",
        "num_bytes": num_bytes,
        "batch_id": batch.id,
        "lifetime_seconds": float(lifetime_seconds),
    }
    connection.execute(INSERT_OUTPUT, values)


END_BATCH = text("""
    UPDATE vectormill.request_batches
       SET state = :state, finished_at = now(), num_completed = :num_completed, num_failed = :num_failed,
           num_tokens = :num_tokens, output_file_id = CAST(:output_file_id AS uuid),
           error_file_id = CAST(:error_file_id AS uuid), lease_owner = NULL, lease_until = NULL, updated_at = now(),
           completed_at = CASE WHEN CAST(:state AS text) = 'completed' THEN now() END,
           expired_at = CASE WHEN CAST(:state AS text) = 'expired' THEN now() END,
           cancelled_at = CASE WHEN CAST(:state AS text) = 'cancelled' THEN now() END
     WHERE id = :batch_id
""")


def end_batch(
    connection: Connection,
    claim: BatchClaim,
    state: str,
    *,
    num_completed: int = 0,
    num_failed: int = 0,
    num_tokens: int = 0,
    output_file_id: UUID | None = None,
    error_file_id: UUID | None = None,
) -> None:
    """Behind keep_batch in the same transaction."""
    values = {
        "batch_id": claim.batch.id,
        "state": state,
        "num_completed": num_completed,
        "num_failed": num_failed,
        "num_tokens": num_tokens,
        "output_file_id": output_file_id,
        "error_file_id": error_file_id,
    }
    connection.execute(END_BATCH, values)
    connection.execute(FORGET_REFUSALS, {"batch_id": claim.batch.id})


HAND_BACK_BATCH = text("""
    UPDATE vectormill.request_batches
       SET lease_until = NULL, lease_owner = NULL, updated_at = now(),
           attempt = attempt - CASE WHEN CAST(:is_counted AS boolean) THEN 0 ELSE 1 END,
           available_at = now() + make_interval(secs => CAST(:pause_seconds AS double precision))
     WHERE id = :batch_id AND fence = :fence
""")


def hand_back_batch(
    connection: Connection, claim: BatchClaim, *, pause_seconds: float = 0.0, is_counted: bool = False
) -> None:
    """Lets another indexer go on, after a pause; an error of ours that made us give up is counted as an attempt."""
    values = {
        "batch_id": claim.batch.id,
        "fence": claim.batch.fence,
        "pause_seconds": pause_seconds,
        "is_counted": is_counted,
    }
    connection.execute(HAND_BACK_BATCH, values)


FIND_OVERDUE = text("""
    SELECT id FROM vectormill.request_batches
     WHERE state = 'in_progress' AND expires_at <= now() AND NOT is_overdue
     ORDER BY seq LIMIT 1
       FOR NO KEY UPDATE SKIP LOCKED
""")

MARK_OVERDUE = text("""
    UPDATE vectormill.request_batches SET is_overdue = true, updated_at = now() WHERE id = :batch_id RETURNING job_id
""")


def expire_next(connection: Connection) -> bool:
    """Cancels the job of a batch whose time is over; False when there is none. One job a transaction."""
    batch_id = connection.execute(FIND_OVERDUE).scalar_one_or_none()
    if batch_id is None:
        return False
    stop_job(connection, connection.execute(MARK_OVERDUE, {"batch_id": batch_id}).scalar_one())
    return True
