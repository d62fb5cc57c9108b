"""The tables of request files, of request batches, and of refused lines."""

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, LargeBinary, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.batches.request_batch import (
    BATCH_STATES,
    ENDPOINTS,
    OPEN_BATCH_STATES,
    PURPOSES,
    REQUEST_FILE_STATES,
)
from vectormill.db.schema import (
    BUSY,
    choice,
    count,
    document,
    flag,
    index,
    lease,
    metadata,
    moment,
    one_of,
    serial,
)

request_files = Table(
    "request_files",
    metadata,
    Column("id", Uuid, primary_key=True),
    # Files are listed in this order.
    serial("seq", nullable=False, unique=True),
    choice("state", REQUEST_FILE_STATES),
    choice("purpose", PURPOSES),
    Column("filename", Text, nullable=False),
    count("num_bytes"),
    # Set if the content is made from the results of this batch's job; NULL if it is stored in
    # request_file_parts.
    Column("batch_id", Uuid),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    moment("expires_at"),
    index("ix_request_files_listed", "seq", where="state = 'processed'"),
    index("ix_request_files_purpose", "purpose", "seq", where="state = 'processed'"),
    # The pruner looks for expired files, and for incomplete or deleted ones.
    index("ix_request_files_expires_at", "expires_at", where="state = 'processed'"),
    index("ix_request_files_unlisted", "state", where="state <> 'processed'"),
)

request_file_parts = Table(
    "request_file_parts",
    metadata,
    Column("file_id", ForeignKey(request_files.c.id, ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("num_bytes", Integer, nullable=False),
    Column("content", LargeBinary, nullable=False),  # zstd
)

request_batches = Table(
    "request_batches",
    metadata,
    Column("id", Uuid, primary_key=True),
    serial("seq", nullable=False, unique=True),
    choice("state", BATCH_STATES),
    choice("endpoint", ENDPOINTS),
    # No foreign keys, since files and jobs are deleted independently of the batch.
    Column("input_file_id", Uuid, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("metadata", JSONB),
    Column("output_lifetime_seconds", Double),
    Column("idempotency_key", Text, unique=True),
    Column("content_hash", LargeBinary, nullable=False),  # of the request, to recognize a repetition
    Column("model", Text),
    Column("job_id", Uuid),
    count("num_lines"),
    count("num_refused"),
    count("num_completed"),
    count("num_failed"),
    count("num_tokens"),
    document("errors", "[]"),
    Column("output_file_id", Uuid),
    Column("error_file_id", Uuid),
    # The completion window passed before the job had ended, and the job was cancelled for that reason.
    flag("is_overdue"),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    moment("expires_at", nullable=False),
    moment("in_progress_at"),
    moment("finalizing_at"),
    moment("completed_at"),
    moment("failed_at"),
    moment("expired_at"),
    moment("cancelling_at"),
    moment("cancelled_at"),
    moment("finished_at"),  # in whichever final state
    *lease(),
    # Indexers poll the open batches all the time, while nearly all batches have ended.
    index("ix_request_batches_open", "seq", where=one_of("state", OPEN_BATCH_STATES)),
    index("ix_request_batches_content_hash", "content_hash"),
    index("ix_request_batches_job_id", "job_id", where="job_id IS NOT NULL"),
    index("ix_request_batches_input", "input_file_id", where="state = 'validating'"),
    index("ix_request_batches_finished_at", "finished_at", where="finished_at IS NOT NULL"),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)

request_refusals = Table(
    "request_refusals",
    metadata,
    # Refused lines are kept here until the error file contains them.
    Column("batch_id", ForeignKey(request_batches.c.id, ondelete="CASCADE"), primary_key=True),
    Column("line", BigInteger, primary_key=True),
    Column("custom_id", Text),
    Column("code", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("param", Text),
)
