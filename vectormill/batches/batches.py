"""Request batches in the database: clients create, find, list and cancel them; indexers claim and end them.

A repeated request creates no second batch. A batch keeps its state when its indexer dies: the indexer that
claims it after the lease has expired repeats the step from its beginning.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final
from uuid import UUID, uuid4

from sqlalchemy import Connection, text

from vectormill.batches.files import MAX_SEQ
from vectormill.batches.request_batch import (
    BATCH,
    CANCELLING,
    FINALIZING,
    IN_PROGRESS,
    REPEATABLE_BATCH_STATES,
    REPEATED_SECONDS,
    TENDED_BATCH_STATES,
    VALIDATING,
    BatchFault,
    NewRequestBatch,
    RequestBatch,
    name_file,
    parse_window,
    state_after_cancel,
)
from vectormill.db.idempotency import bare_idempotency_key
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import (
    IdempotencyMismatch,
    InvalidOption,
    JobNotFound,
    RequestBatchNotFound,
    RequestFileNotFound,
    WrongJobState,
)
from vectormill.domain.states import States
from vectormill.jobs.job import RECEIVED_JOB_STATES
from vectormill.jobs.jobs import cancel_job
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.work.work import Held, Lease, Work, claim

BATCHES: Final = Work(
    table="vectormill.request_batches",
    row="batch",
    # A batch in progress waits until its job has ended; claiming it then begins the finalizing.
    begins={IN_PROGRESS: FINALIZING},
    working=States((VALIDATING, FINALIZING, CANCELLING)),
)

# LEFT JOIN, because the job of an ended batch may have been deleted.
_BATCH: Final = """
    SELECT batch.id, batch.seq, batch.state, batch.endpoint, batch.input_file_id, batch.completion_window,
           batch.metadata, batch.output_lifetime_seconds, batch.model, batch.job_id, batch.num_lines,
           batch.num_refused, batch.num_completed, batch.num_failed, batch.num_tokens, batch.errors,
           batch.output_file_id, batch.error_file_id, batch.is_overdue, batch.created_at, batch.expires_at,
           batch.in_progress_at, batch.finalizing_at, batch.completed_at, batch.failed_at, batch.expired_at,
           batch.cancelling_at, batch.cancelled_at, batch.fence, batch.attempt, job.state AS job_state,
           job.num_items AS job_items, job.num_done AS job_done, job.num_failed AS job_failed,
           job.num_tokens AS job_tokens
      FROM vectormill.request_batches AS batch
      LEFT JOIN vectormill.jobs AS job ON job.id = batch.job_id
"""
FIND_BATCH = text(f"{_BATCH} WHERE batch.id = :batch_id")
LIST_BATCHES = text(f"{_BATCH} WHERE batch.seq < :before_seq ORDER BY batch.seq DESC LIMIT :limit")

# Equal requests take this lock in turn, so that the second finds the batch that the first has created.
TAKE_TURN = text("SELECT pg_advisory_xact_lock(hashtextextended(:content, 17))")

FIND_REPEATED = text(f"""
    SELECT id FROM vectormill.request_batches
     WHERE content_hash = :content_hash AND idempotency_key IS NULL
       AND (state IN {REPEATABLE_BATCH_STATES}
            OR (state = 'completed'
                AND created_at > now() - make_interval(secs => CAST(:repeated_seconds AS double precision))))
     ORDER BY seq DESC LIMIT 1
""")

# The bare key is explained at FIND_BY_IDEMPOTENCY_KEY in vectormill/jobs/submission.py.
FIND_BY_KEY = text("""
    SELECT id, content_hash FROM vectormill.request_batches
     WHERE idempotency_key = :key OR (idempotency_key = :bare_key AND created_at > now() - interval '1 day')
     ORDER BY idempotency_key = :key DESC LIMIT 1
""")

# The lock lasts until COMMIT, so that nobody deletes the file before the batch that needs it exists.
SHARE_FILE = text("""
    SELECT purpose FROM vectormill.request_files
     WHERE id = :file_id AND state = 'processed' AND (expires_at IS NULL OR expires_at > now())
       FOR SHARE
""")

INSERT_BATCH = text("""
    INSERT INTO vectormill.request_batches
           (id, state, endpoint, input_file_id, completion_window, metadata, output_lifetime_seconds, idempotency_key,
            content_hash, expires_at)
    VALUES (:id, 'validating', :endpoint, :input_file_id, :completion_window, CAST(:metadata AS jsonb),
            :output_lifetime_seconds, :idempotency_key, :content_hash,
            now() + make_interval(secs => CAST(:window_seconds AS double precision)))
""")


def create_batch(connection: Connection, new: NewRequestBatch) -> RequestBatch:
    """Create a batch and return it, or return the earlier batch if this request is a repetition.

    If the request has an Idempotency-Key, it is a repetition if an earlier request had the same key. Without
    a key, it is one if all fields are equal and the earlier batch has neither ended nor been cancelled, or
    has completed and was created in the last ten minutes. Raise IdempotencyMismatch, RequestFileNotFound and
    InvalidOption.
    """
    window_seconds = parse_window(new.completion_window)
    content = describe_content(new)
    content_hash = hashlib.blake2b(content.encode(), digest_size=16).digest()
    connection.execute(TAKE_TURN, {"content": new.idempotency_key or content})
    known = _find_known(connection, new.idempotency_key, content_hash)
    if known is not None:
        return find_batch(connection, known)
    purpose = connection.execute(SHARE_FILE, {"file_id": new.input_file_id}).scalar_one_or_none()
    if purpose is None:
        raise RequestFileNotFound(
            f"There is no file {name_file(new.input_file_id)}; upload it with POST /v1/files and purpose={BATCH!r}."
        )
    if purpose != BATCH:
        raise InvalidOption(
            f"The file {name_file(new.input_file_id)} has the purpose {purpose!r}; a batch needs one with purpose "
            f"{BATCH!r}."
        )
    batch_id = uuid4()
    connection.execute(
        INSERT_BATCH,
        {
            **asdict(new),
            "id": batch_id,
            "metadata": None if new.metadata is None else to_jsonb(dict(new.metadata)),
            "content_hash": content_hash,
            "window_seconds": window_seconds,
        },
    )
    return find_batch(connection, batch_id)


# The fields that are compared by their places. A field that is added later is compared by its name, unless it has its
# default, so that keys from before there was the field stay valid.
_COMPARED_BY_PLACE: Final = (
    "endpoint", "input_file_id", "completion_window", "metadata", "output_lifetime_seconds", "idempotency_key",
)  # fmt: skip


def describe_content(new: NewRequestBatch) -> str:
    """Return a text that is equal for two requests if all their fields but the Idempotency-Key are equal."""
    metadata = sorted((new.metadata or {}).items())
    placed = [
        new.endpoint, new.input_file_id.hex, new.completion_window, metadata, new.output_lifetime_seconds
    ]  # fmt: skip
    named = {
        each.name: value
        for each in fields(new)
        if each.name not in _COMPARED_BY_PLACE and (value := getattr(new, each.name)) != each.default
    }
    return to_jsonb([*placed, named] if named else placed)


def _find_known(connection: Connection, idempotency_key: str | None, content_hash: bytes) -> UUID | None:
    if idempotency_key is None:
        values = {"content_hash": content_hash, "repeated_seconds": REPEATED_SECONDS}
        known: UUID | None = connection.execute(FIND_REPEATED, values).scalar_one_or_none()
        return known
    keys = {"key": idempotency_key, "bare_key": bare_idempotency_key(idempotency_key)}
    row = connection.execute(FIND_BY_KEY, keys).one_or_none()
    if row is None:
        return None
    if bytes(row.content_hash) != content_hash:
        raise IdempotencyMismatch(
            "This Idempotency-Key was already used for a different batch; use a new key for a new batch."
        )
    found: UUID = row.id
    return found


def find_batch(connection: Connection, batch_id: UUID) -> RequestBatch:
    """Return the batch with this id. Raise RequestBatchNotFound."""
    row = connection.execute(FIND_BATCH, {"batch_id": batch_id}).one_or_none()
    if row is None:
        raise RequestBatchNotFound
    return RequestBatch(**row._mapping)


def list_batches(connection: Connection, *, after: UUID | None, limit: int) -> list[RequestBatch]:
    """List up to `limit` batches, newest first, that are older than the batch `after`.

    Raise RequestBatchNotFound if the batch `after` does not exist.
    """
    before_seq = MAX_SEQ if after is None else find_batch(connection, after).seq
    rows = connection.execute(LIST_BATCHES, {"before_seq": before_seq, "limit": limit})
    return [RequestBatch(**row._mapping) for row in rows]


LOCK_BATCH = text("SELECT 1 FROM vectormill.request_batches WHERE id = :batch_id FOR NO KEY UPDATE")

# This revokes the lease of an indexer that is validating the batch.
MARK_CANCELLING = BATCHES.compose_revocation(
    "state = 'cancelling', cancelling_at = now(), available_at = now(), attempt = 0, updated_at = now()",
    where="id = :batch_id",
)


def cancel_batch(connection: Connection, batch_id: UUID) -> RequestBatch:
    """Cancel a batch and its job; lines that are already answered keep their answer.

    A second cancellation changes nothing. Raise RequestBatchNotFound and WrongBatchState.
    """
    connection.execute(LOCK_BATCH, {"batch_id": batch_id})
    batch = find_batch(connection, batch_id)
    if batch.state != state_after_cancel(batch.state):
        connection.execute(MARK_CANCELLING, {"batch_id": batch_id})
        # While the batch is validating, its job is still an upload. The upload's last transaction may be
        # waiting for our lock; it then fails, because the fence has changed.
        if batch.state == IN_PROGRESS:
            stop_job(connection, batch.job_id)
    return find_batch(connection, batch_id)


def stop_job(connection: Connection, job_id: UUID | None) -> None:
    """Cancel a batch's job. Do nothing if there is no job, or if it has ended."""
    if job_id is not None:
        with contextlib.suppress(JobNotFound, WrongJobState):
            cancel_job(connection, job_id)


FIND_HOLDING_BATCH = text("""
    SELECT batch.id
      FROM vectormill.request_batches AS batch
     WHERE batch.job_id = :job_id
       AND (batch.finished_at IS NULL
            OR EXISTS (SELECT 1 FROM vectormill.request_files AS file
                        WHERE file.id = batch.output_file_id AND file.state = 'processed'))
     LIMIT 1
""")


def refuse_job_of_batch(connection: Connection, job_id: UUID, change: str) -> None:
    """Raise WrongJobState if a batch's answers are made from the job's results, which must then not change.

    `change` completes the message "it cannot be …", such as "retried".
    """
    batch_id = connection.execute(FIND_HOLDING_BATCH, {"job_id": job_id}).scalar_one_or_none()
    if batch_id is not None:
        raise WrongJobState(
            f"The answers of batch batch_{batch_id.hex} are made from this job's results, so it cannot be {change}; "
            "delete the batch's output file first, or send the lines of its error file as a new batch."
        )


# A batch is kept as long as its output file, whose content is made from the results of the batch's job.
DELETE_OLD_BATCHES = text("""
    DELETE FROM vectormill.request_batches
     WHERE id IN (
        SELECT batch.id FROM vectormill.request_batches AS batch
         WHERE batch.finished_at < now() - make_interval(secs => CAST(:retention_seconds AS double precision))
           AND NOT EXISTS (SELECT 1 FROM vectormill.request_files AS file
                            WHERE file.id = batch.output_file_id AND file.state = 'processed')
         ORDER BY batch.finished_at LIMIT 1000 FOR UPDATE SKIP LOCKED)
    RETURNING id
""")


def delete_old_batches(connection: Connection, retention_seconds: float) -> int:
    """Delete up to 1,000 batches that ended over `retention_seconds` ago; return their number."""
    values = {"retention_seconds": float(retention_seconds)}
    return len(connection.execute(DELETE_OLD_BATCHES, values).all())


# A batch in progress can be claimed once its job has ended, for whatever reason.
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
    """Claim the oldest batch that needs work. Return its lease and the batch, or None if there is none."""
    for lease, _ in claim(connection, BATCHES, CLAIM_BATCH, owner=owner, lease_seconds=lease_seconds):
        return lease, find_batch(connection, lease.key)
    return None


NOTE_JOB = text("UPDATE vectormill.request_batches SET job_id = :job_id WHERE id = :batch_id")
FORGET_REFUSALS = text("DELETE FROM vectormill.request_refusals WHERE batch_id = :batch_id")


def begin_reading(connection: Connection, lease: Lease, job_id: UUID) -> None:
    """Record the batch's job before any of it is written, and delete refusals of an earlier attempt.

    Raise LeaseLost.
    """
    lease.keep(connection)
    connection.execute(NOTE_JOB, {"batch_id": lease.key, "job_id": job_id})
    connection.execute(FORGET_REFUSALS, {"batch_id": lease.key})


# In the transaction that queues the batch's job.
BEGIN_PROGRESS = BATCHES.compose_release("""
    state = 'in_progress', in_progress_at = now(), model = :model, num_lines = :num_lines, num_refused = :num_refused,
    attempt = 0, updated_at = now()
""")


FAIL_BATCH = BATCHES.compose_release("""
    state = 'failed', failed_at = now(), finished_at = now(), errors = CAST(:errors AS jsonb),
    num_lines = :num_lines, num_failed = :num_lines, updated_at = now()
""")


def fail_batch(
    connection: Connection, lease: Lease, faults: Sequence[BatchFault], num_lines: int = 0
) -> None:
    """End a batch as failed, because none of its requests can be answered. Raise LeaseLost."""
    errors = to_jsonb(list(map(asdict, faults)))
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
    """Add an output file, whose content is made from the job's results whenever it is read."""
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
    """End the batch in `state`, with its counts and the ids of its files. Raise LeaseLost."""
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
    """Cancel the job of one batch whose completion window has passed. Return False if there is none."""
    batch_id = connection.execute(FIND_OVERDUE).scalar_one_or_none()
    if batch_id is None:
        return False
    stop_job(connection, connection.execute(MARK_OVERDUE, {"batch_id": batch_id}).scalar_one())
    return True


@dataclass(slots=True, kw_only=True)
class HeldBatch(Held):
    """A claimed batch, with the settings and registry that its next step needs."""

    batch: RequestBatch
    settings: Settings
    registry: Registry
