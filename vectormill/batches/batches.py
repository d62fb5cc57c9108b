"""Request batches as clients see them: made once however often they are asked for, found, listed, cancelled."""

import hashlib
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import Connection, Row, text

from vectormill.batches.request_batch import (
    CANCELLING,
    FINALIZING,
    IN_PROGRESS,
    REPEATABLE_BATCH_STATES,
    REPEATED_SECONDS,
    VALIDATING,
    NewRequestBatch,
    RequestBatch,
    parse_window,
    state_after_cancel,
)
from vectormill.batches.request_file import BATCH, name_file
from vectormill.db.idempotency import bare_idempotency_key
from vectormill.db.jsonb import to_jsonb
from vectormill.domain.errors import (
    IdempotencyMismatch,
    InvalidOption,
    JobNotFound,
    RequestBatchNotFound,
    RequestFileNotFound,
    WrongJobState,
)
from vectormill.domain.states import States
from vectormill.jobs.jobs import cancel_job
from vectormill.work.work import Work

BATCHES: Final = Work(
    table="vectormill.request_batches",
    row="batch",
    # A batch in progress is nobody's matter until its job has ended.
    begins={IN_PROGRESS: FINALIZING},
    working=States((VALIDATING, FINALIZING, CANCELLING)),
)

# The job of a batch that has ended may be gone.
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
_MAX_SEQ: Final = 2**63 - 1

# Whoever asks for the same waits here, so that the second of two finds what the first has made.
TAKE_TURN = text("SELECT pg_advisory_xact_lock(hashtextextended(:content, 17))")

FIND_REPEATED = text(f"""
    SELECT id FROM vectormill.request_batches
     WHERE content_hash = :content_hash AND idempotency_key IS NULL
       AND (state IN {REPEATABLE_BATCH_STATES}
            OR (state = 'completed'
                AND created_at > now() - make_interval(secs => CAST(:repeated_seconds AS double precision))))
     ORDER BY seq DESC LIMIT 1
""")

# A bare key: see FIND_BY_IDEMPOTENCY_KEY of vectormill/jobs/submission.py.
FIND_BY_KEY = text("""
    SELECT id, content_hash FROM vectormill.request_batches
     WHERE idempotency_key = :key OR (idempotency_key = :bare_key AND created_at > now() - interval '1 day')
     ORDER BY idempotency_key = :key DESC LIMIT 1
""")

# Locked until COMMIT, so that nobody deletes it before the batch is there, which keeps it.
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
    """The batch that is asked for: a new one, or that of an earlier request of which this is a repetition.

    With an Idempotency-Key the key tells; without one it is a repetition when all that is asked for is the same, and
    the earlier batch has not ended, or was made in the last ten minutes and completed. Raises IdempotencyMismatch,
    RequestFileNotFound and InvalidOption.
    """
    window_seconds = parse_window(new.completion_window)
    content = describe_content(new)
    content_hash = hashlib.blake2b(content.encode(), digest_size=16).digest()
    connection.execute(TAKE_TURN, {"content": new.idempotency_key or content})
    known = _find_known(connection, new.idempotency_key, content_hash)
    if known is not None:
        return find_batch(connection, known)
    _share_input(connection, new.input_file_id)
    batch_id = uuid4()
    connection.execute(
        INSERT_BATCH,
        {
            "id": batch_id,
            "endpoint": new.endpoint,
            "input_file_id": new.input_file_id,
            "completion_window": new.completion_window,
            "metadata": None if new.metadata is None else to_jsonb(dict(new.metadata)),
            "output_lifetime_seconds": new.output_lifetime_seconds,
            "idempotency_key": new.idempotency_key,
            "content_hash": content_hash,
            "window_seconds": window_seconds,
        },
    )
    return find_batch(connection, batch_id)


def describe_content(new: NewRequestBatch) -> str:
    """All that a repetition repeats."""
    metadata = sorted((new.metadata or {}).items())
    return to_jsonb(
        [
            new.endpoint,
            new.input_file_id.hex,
            new.completion_window,
            metadata,
            new.output_lifetime_seconds,
        ]
    )


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
            "This Idempotency-Key was used for a batch that asked for something else; use a new key for a new batch."
        )
    found: UUID = row.id
    return found


def _share_input(connection: Connection, file_id: UUID) -> None:
    purpose = connection.execute(SHARE_FILE, {"file_id": file_id}).scalar_one_or_none()
    if purpose is None:
        raise RequestFileNotFound(
            f"There is no file {name_file(file_id)}; upload it with POST /v1/files and purpose={BATCH!r}."
        )
    if purpose != BATCH:
        raise InvalidOption(
            f"The file {name_file(file_id)} is of purpose {purpose!r}; a batch reads {BATCH!r}."
        )


def find_batch(connection: Connection, batch_id: UUID) -> RequestBatch:
    """Raises RequestBatchNotFound."""
    row = connection.execute(FIND_BATCH, {"batch_id": batch_id}).one_or_none()
    if row is None:
        raise RequestBatchNotFound
    return _batch(row)


def list_batches(connection: Connection, *, after: UUID | None, limit: int) -> list[RequestBatch]:
    """Batches, newest first, behind the one with the id `after`. Raises RequestBatchNotFound when that one is gone."""
    before_seq = _MAX_SEQ if after is None else find_batch(connection, after).seq
    rows = connection.execute(LIST_BATCHES, {"before_seq": before_seq, "limit": limit})
    return [_batch(row) for row in rows]


def _batch(row: Row[Any]) -> RequestBatch:
    return RequestBatch(**row._mapping)


LOCK_BATCH = text("SELECT 1 FROM vectormill.request_batches WHERE id = :batch_id FOR NO KEY UPDATE")

# An indexer that validates it loses the batch with this.
MARK_CANCELLING = BATCHES.compose_revocation(
    "state = 'cancelling', cancelling_at = now(), available_at = now(), attempt = 0, updated_at = now()",
    where="id = :batch_id",
)


def cancel_batch(connection: Connection, batch_id: UUID) -> RequestBatch:
    """Stops a batch, and its job; lines that have their answer keep it. Twice is the same as once.

    Raises RequestBatchNotFound and WrongBatchState.
    """
    connection.execute(LOCK_BATCH, {"batch_id": batch_id})
    batch = find_batch(connection, batch_id)
    if batch.state != state_after_cancel(batch.state):
        connection.execute(MARK_CANCELLING, {"batch_id": batch_id})
        # While it is validating the job is an upload, whose last transaction may wait for our lock: it finds the fence.
        if batch.state == IN_PROGRESS:
            stop_job(connection, batch.job_id)
    return find_batch(connection, batch_id)


def stop_job(connection: Connection, job_id: UUID | None) -> None:
    """Cancels a batch's job, unless it has ended, or never began."""
    if job_id is None:
        return
    try:
        cancel_job(connection, job_id)
    except (JobNotFound, WrongJobState):
        return


FIND_HOLDING_BATCH = text("""
    SELECT batch.id
      FROM vectormill.request_batches AS batch
     WHERE batch.job_id = :job_id
       AND (batch.finished_at IS NULL
            OR EXISTS (SELECT 1 FROM vectormill.request_files AS file
                        WHERE file.id = batch.output_file_id AND file.state = 'processed'))
     LIMIT 1
""")


def refuse_job_of_batch(connection: Connection, job_id: UUID, wish: str) -> None:
    """Raises WrongJobState while a batch's answers are made of the job's results, and so must stay what they are."""
    batch_id = connection.execute(FIND_HOLDING_BATCH, {"job_id": job_id}).scalar_one_or_none()
    if batch_id is not None:
        raise WrongJobState(
            f"The answers of batch batch_{batch_id.hex} are made of this job's results, so it cannot be {wish}; delete "
            "the batch's output file first, or send the lines of its error file as a new batch."
        )


# Batches that nobody reads any more. Answers that are kept longer than that keep their batch.
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
    """Batches that ended so long ago; how many."""
    values = {"retention_seconds": float(retention_seconds)}
    return len(connection.execute(DELETE_OLD_BATCHES, values).all())
