"""Jobs, their chunks, and what lies beside a chunk.

Columns of `chunks` that change with every claim leave room in the page (fillfactor) so that most updates stay on it.
"""

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
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from vectormill.collections.table import generations
from vectormill.db.schema import BUSY, count, metadata, moment, one_of
from vectormill.jobs.chunk import CHUNK_STATES
from vectormill.jobs.job import ALL_JOB_STATES, OPEN_JOB_STATES

jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid, primary_key=True),
    # Orders submissions, and writers: a row of a collection is never overwritten from an earlier place.
    Column("seq", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column(
        "state",
        Text,
        CheckConstraint(one_of("state", ALL_JOB_STATES), name="state"),
        nullable=False,
    ),
    Column("model", Text, nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("generation_id", ForeignKey(generations.c.id, ondelete="SET NULL")),
    Column(
        "priority", SmallInteger, CheckConstraint("priority BETWEEN 0 AND 9", name="priority"), nullable=False
    ),
    Column("metadata", JSONB, nullable=False, server_default=text("'{}'")),
    Column("idempotency_key", Text, unique=True),
    Column("content_hash", LargeBinary),
    count("num_items"),
    count("num_done"),
    count("num_failed"),
    count("num_chunks", Integer),
    # The finisher is the transaction that brings this to zero.
    count("num_open_chunks", Integer),
    count("num_retried_chunks", Integer),
    count("num_tokens"),
    count("num_computed_tokens"),
    count("num_truncated"),
    Column("stage_seconds", JSONB, nullable=False, server_default=text("'{}'")),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    moment("started_at"),
    moment("finished_at"),
    count("num_passages"),
    count("num_reused"),
    moment("paused_at"),
    # Since started_at, while the job was paused or had ended before a retry: nobody was to work on it.
    Column("idle_seconds", Double, nullable=False, server_default=text("0")),
    # The moment from which nobody asks for it any more, whether or not its API has removed it.
    moment("forget_at"),
    # The job whose items this one encodes for a generation that is being built beside the live one.
    Column("twin_of", Uuid),
    # In the order of writers, that of the original, whatever the twin's seq; NULL: the job's own seq.
    Column("place", BigInteger),
    # The trace of the request that submitted it (W3C Trace Context); NULL where no traces are recorded.
    Column("traceparent", Text),
    # The dispatcher and the reaper look at jobs in progress many times a second; nearly all jobs are ended ones.
    Index(
        "ix_jobs_in_progress",
        "model",
        "priority",
        "seq",
        postgresql_where=text(one_of("state", OPEN_JOB_STATES)),
    ),
    Index("ix_jobs_state_seq", "state", "seq"),
    Index("ix_jobs_generation_id", "generation_id", postgresql_where=text("generation_id IS NOT NULL")),
    Index("ix_jobs_twin_of", "twin_of", postgresql_where=text("twin_of IS NOT NULL")),
    Index("ix_jobs_forget_at", "forget_at", postgresql_where=text("forget_at IS NOT NULL")),
    Index("ix_jobs_finished_at", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "1000"},
)

chunks = Table(
    "chunks",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("job_id", ForeignKey(jobs.c.id, ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("state", Text, CheckConstraint(one_of("state", CHUNK_STATES), name="state"), nullable=False),
    Column("first_item", BigInteger, nullable=False),  # position in the job of the chunk's first item
    Column("num_items", Integer, nullable=False),
    # Set by a retry: only these positions within the chunk are encoded.
    Column("only_items", ARRAY(Integer)),
    count("fence"),
    count("attempt", Integer),
    count("lost", Integer),
    count("dispatch_seq", Integer),
    moment("available_at", is_now=True),
    moment("queued_at"),
    Column("lease_owner", Text),
    moment("lease_until"),
    Column("parent_id", BigInteger),
    Column("error", Text),
    count("lapsed", Integer),
    # Nothing else was being encoded by its worker: see crash_recovery.py.
    Column("is_alone", Boolean, nullable=False, server_default=text("false")),
    Column("estimated_tokens", Integer, nullable=False),  # by chunk_size.py
    # No constraint says that it is unique: that would keep `chunks` from being partitioned by id (decision 0056). Who
    # numbers chunks has made the job in the same transaction, or holds its row.
    Index("ix_chunks_job_id_seq", "job_id", "seq"),
    Index("ix_chunks_pending", "job_id", "seq", postgresql_where=text("state = 'pending'")),
    Index("ix_chunks_queued", "queued_at", postgresql_where=text("state = 'queued'")),
    # Not on lease_until: a renewal would touch the index, and so every other of the table. Few are leased at a time.
    Index("ix_chunks_held", "job_id", postgresql_where=text("state = 'leased'")),
    Index("ix_chunks_order", "job_id", "first_item"),
    postgresql_with={
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.05",
    },
)

chunk_payloads = Table(
    "chunk_payloads",
    metadata,
    Column("chunk_id", ForeignKey(chunks.c.id, ondelete="CASCADE"), primary_key=True),
    Column("items", LargeBinary, nullable=False),
    # For rows that were carried from another generation: the place of each among the writers. NULL: that of the job.
    Column("places", ARRAY(BigInteger)),
)

chunk_vectors = Table(
    "chunk_vectors",
    metadata,
    Column("chunk_id", ForeignKey(chunks.c.id, ondelete="CASCADE"), primary_key=True),
    # Rows [num_items, width] of the job's vector type: see pack_block in vector_types.py.
    Column("vectors", LargeBinary, nullable=False),
    # int32 [num_items]: the tokens of each; NULL of records.
    Column("item_tokens", LargeBinary),
)

chunk_truncations = Table(
    "chunk_truncations",
    metadata,
    Column("chunk_id", ForeignKey(chunks.c.id, ondelete="CASCADE"), primary_key=True),
    Column("items", ARRAY(Integer), nullable=False),  # positions in the chunk of items that were cut
)

item_errors = Table(
    "item_errors",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("item", BigInteger, primary_key=True),  # position in the job
    Column("chunk_id", BigInteger, nullable=False),
    Column("key", Text, nullable=False),
    Column("code", Text, nullable=False),
    Column("detail", Text, nullable=False),
)

# Idempotency-Keys of files, pushes, runs and webhooks, and what each has made. Jobs and batches keep theirs themselves.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("operation", Text, primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("content_hash", LargeBinary, nullable=False),
    # NULL only inside the transaction that makes it.
    Column("made_id", Text),
    moment("created_at", is_now=True),
    Index("ix_idempotency_keys_created_at", "created_at"),
)
