"""The tables of request files, of request batches, and of refused lines."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.batches.request_batch import (
    BATCH_STATES,
    ENDPOINTS,
    OPEN_BATCH_STATES,
    PURPOSES,
    REQUEST_FILE_STATES,
)
from vectormill.db.schema import BUSY, count, metadata, moment, one_of

request_files = Table(
    "request_files",
    metadata,
    Column("id", Uuid, primary_key=True),
    # Files are listed in this order.
    Column("seq", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column(
        "state", Text, CheckConstraint(one_of("state", REQUEST_FILE_STATES), name="state"), nullable=False
    ),
    Column("purpose", Text, CheckConstraint(one_of("purpose", PURPOSES), name="purpose"), nullable=False),
    Column("filename", Text, nullable=False),
    count("num_bytes"),
    # Set if the content is made from the results of this batch's job; NULL if it is stored in
    # request_file_parts.
    Column("batch_id", Uuid),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    moment("expires_at"),
    Index("ix_request_files_listed", "seq", postgresql_where=text("state = 'processed'")),
    Index("ix_request_files_purpose", "purpose", "seq", postgresql_where=text("state = 'processed'")),
    # The pruner looks for expired files, and for incomplete or deleted ones.
    Index("ix_request_files_expires_at", "expires_at", postgresql_where=text("state = 'processed'")),
    Index("ix_request_files_unlisted", "state", postgresql_where=text("state <> 'processed'")),
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
    Column("seq", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column("state", Text, CheckConstraint(one_of("state", BATCH_STATES), name="state"), nullable=False),
    Column("endpoint", Text, CheckConstraint(one_of("endpoint", ENDPOINTS), name="endpoint"), nullable=False),
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
    Column("errors", JSONB, nullable=False, server_default=text("'[]'")),
    Column("output_file_id", Uuid),
    Column("error_file_id", Uuid),
    # The completion window passed before the job had ended, and the job was cancelled for that reason.
    Column("is_overdue", Boolean, nullable=False, server_default=text("false")),
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
    count("fence"),
    count("attempt", Integer),
    Column("lease_owner", Text),
    moment("lease_until"),
    moment("available_at", is_now=True),
    # Indexers poll the open batches all the time, while nearly all batches have ended.
    Index("ix_request_batches_open", "seq", postgresql_where=text(one_of("state", OPEN_BATCH_STATES))),
    Index("ix_request_batches_content_hash", "content_hash"),
    Index("ix_request_batches_job_id", "job_id", postgresql_where=text("job_id IS NOT NULL")),
    Index("ix_request_batches_input", "input_file_id", postgresql_where=text("state = 'validating'")),
    Index("ix_request_batches_finished_at", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
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
