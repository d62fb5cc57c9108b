"""Claims of request batches, and what is written under them: an indexer reads a batch's lines or finishes its answers.

A batch stays in its state when its indexer dies; whoever claims it after the lease does that step again from its
beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.batches.batches import BATCHES, find_batch, stop_job
from vectormill.batches.request_batch import TENDED_BATCH_STATES, BatchFault, RequestBatch
from vectormill.db.jsonb import to_jsonb
from vectormill.jobs.job import RECEIVED_JOB_STATES
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.work.loop import Held
from vectormill.work.work import Lease, claim

# A batch that waits for its job is nobody's matter until that has ended, whoever ended it.
CLAIM_BATCH = BATCHES.compose_claim(
    f"""
        SELECT batch.id
          FROM vectormill.request_batches AS batch
         WHERE {{claimable}}
           AND (batch.state IN {TENDED_BATCH_STATES}
                OR NOT EXISTS (SELECT 1 FROM vectormill.jobs AS job
                                WHERE job.id = batch.job_id
                                  AND job.state IN {RECEIVED_JOB_STATES}))
         ORDER BY batch.seq
         LIMIT 1
         {{lock}}
    """,
    sets="""
        finalizing_at = CASE WHEN batch.state = 'in_progress' THEN now() ELSE batch.finalizing_at END,
        updated_at = now()
    """,
)


def claim_batch(
    connection: Connection, owner: str, lease_seconds: float
) -> tuple[Lease, RequestBatch] | None:
    """Claim the oldest batch for which there is something to do; None if there is none."""
    for lease, _ in claim(connection, BATCHES, CLAIM_BATCH, owner=owner, lease_seconds=lease_seconds):
        return lease, find_batch(connection, lease.key)
    return None


NOTE_JOB = text("UPDATE vectormill.request_batches SET job_id = :job_id WHERE id = :batch_id")
FORGET_REFUSALS = text("DELETE FROM vectormill.request_refusals WHERE batch_id = :batch_id")


def begin_reading(connection: Connection, lease: Lease, job_id: UUID) -> None:
    """Note the job before anything of it is written, and forget what an earlier attempt refused. Raises LeaseLost."""
    lease.keep(connection)
    connection.execute(NOTE_JOB, {"batch_id": lease.key, "job_id": job_id})
    connection.execute(FORGET_REFUSALS, {"batch_id": lease.key})


BEGIN_PROGRESS = BATCHES.compose_release("""
    state = 'in_progress', in_progress_at = now(), model = :model, num_lines = :num_lines, num_refused = :num_refused,
    attempt = 0, updated_at = now()
""")


def begin_progress(
    connection: Connection, lease: Lease, *, model: str, num_lines: int, num_refused: int
) -> None:
    """Leave the batch to its job, in the transaction that queues that. Raises LeaseLost."""
    lease.release(connection, BEGIN_PROGRESS, model=model, num_lines=num_lines, num_refused=num_refused)


FAIL_BATCH = BATCHES.compose_release("""
    state = 'failed', failed_at = now(), finished_at = now(), errors = CAST(:errors AS jsonb),
    num_lines = :num_lines, num_failed = :num_lines, updated_at = now()
""")


def fail_batch(
    connection: Connection, lease: Lease, faults: Sequence[BatchFault], num_lines: int = 0
) -> None:
    """End a batch of which nothing can be answered. Raises LeaseLost."""
    errors = to_jsonb([fault.to_json() for fault in faults])
    lease.release(connection, FAIL_BATCH, errors=errors, num_lines=num_lines)
    connection.execute(FORGET_REFUSALS, {"batch_id": lease.key})


INSERT_OUTPUT = text("""
    INSERT INTO vectormill.request_files (id, state, purpose, filename, num_bytes, batch_id, expires_at)
    VALUES (:id, 'processed', 'batch_output', :filename, :num_bytes, :batch_id,
            now() + make_interval(secs => CAST(:lifetime_seconds AS double precision)))
""")


def add_output(
    connection: Connection, batch: RequestBatch, file_id: UUID, num_bytes: int, lifetime_seconds: float
) -> None:
    """Add a file whose content is made when it is read."""
    values = {
        "id": file_id,
        "filename": f"{batch.name}_output.jsonl",
        "num_bytes": num_bytes,
        "batch_id": batch.id,
        "lifetime_seconds": float(lifetime_seconds),
    }
    connection.execute(INSERT_OUTPUT, values)


END_BATCH = BATCHES.compose_release("""
    state = :state, finished_at = now(), num_completed = :num_completed, num_failed = :num_failed,
    num_tokens = :num_tokens, output_file_id = CAST(:output_file_id AS uuid),
    error_file_id = CAST(:error_file_id AS uuid), updated_at = now(),
    completed_at = CASE WHEN CAST(:state AS text) = 'completed' THEN now() END,
    expired_at = CASE WHEN CAST(:state AS text) = 'expired' THEN now() END,
    cancelled_at = CASE WHEN CAST(:state AS text) = 'cancelled' THEN now() END
""")


def end_batch(
    connection: Connection,
    lease: Lease,
    state: str,
    *,
    num_completed: int = 0,
    num_failed: int = 0,
    num_tokens: int = 0,
    output_file_id: UUID | None = None,
    error_file_id: UUID | None = None,
) -> None:
    """End the batch in this state. Raises LeaseLost."""
    lease.release(
        connection,
        END_BATCH,
        state=state,
        num_completed=num_completed,
        num_failed=num_failed,
        num_tokens=num_tokens,
        output_file_id=output_file_id,
        error_file_id=error_file_id,
    )
    connection.execute(FORGET_REFUSALS, {"batch_id": lease.key})


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
    """Cancel the job of a batch whose time is over, one a transaction; return False if there is none."""
    batch_id = connection.execute(FIND_OVERDUE).scalar_one_or_none()
    if batch_id is None:
        return False
    stop_job(connection, connection.execute(MARK_OVERDUE, {"batch_id": batch_id}).scalar_one())
    return True


@dataclass(slots=True, kw_only=True)
class HeldBatch(Held):
    """A batch as it was claimed."""

    batch: RequestBatch
    settings: Settings
    registry: Registry
