"""Tables of jobs, their chunks, and the payloads, results and errors of chunks.

The fillfactor of `chunks` leaves free space in each page, so that most updates by claims stay on the same
page.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
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
from vectormill.db.schema import BUSY, choice, count, document, flag, index, metadata, moment, one_of, serial
from vectormill.jobs.chunk import CHUNK_STATES
from vectormill.jobs.job import ALL_JOB_STATES, DISPATCHED_JOB_STATES, OPEN_JOB_STATES

_IS_OPEN = one_of("state", OPEN_JOB_STATES)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid, primary_key=True),
    # The order of submissions, and of writers: a row of a collection is never overwritten by a job with a
    # lower seq.
    serial("seq", nullable=False, unique=True),
    choice("state", ALL_JOB_STATES),
    Column("model", Text, nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("generation_id", ForeignKey(generations.c.id, ondelete="SET NULL")),
    Column(
        "priority", SmallInteger, CheckConstraint("priority BETWEEN 0 AND 9", name="priority"), nullable=False
    ),
    document("metadata"),
    Column("idempotency_key", Text, unique=True),
    Column("content_hash", LargeBinary),
    count("num_items"),
    count("num_done"),
    count("num_failed"),
    count("num_chunks", Integer),
    # The transaction that brings this to zero ends the job.
    count("num_open_chunks", Integer),
    count("num_retried_chunks", Integer),
    count("num_tokens"),
    count("num_computed_tokens"),
    count("num_truncated"),
    document("stage_seconds"),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    moment("started_at"),
    moment("finished_at"),
    count("num_passages"),
    count("num_reused"),
    moment("paused_at"),
    # The seconds since started_at in which the job was paused, or had ended before a retry.
    Column("idle_seconds", Double, nullable=False, server_default=text("0")),
    # The moment from which the job is no longer needed, whether or not the API has removed it.
    moment("forget_at"),
    # The job whose items this one encodes for a generation that is being built alongside the live one.
    Column("twin_of", Uuid),
    # The position in the order of writers that a twin inherits from its original; NULL if the job's own seq
    # applies.
    Column("place", BigInteger),
    # The W3C trace context of the request that submitted the job; NULL if no traces are recorded.
    Column("traceparent", Text),
    # The dispatcher reads its beginning many times a second, so jobs that it must not dispatch are not in it.
    index("ix_jobs_dispatched", "model", "priority", "seq", where=one_of("state", DISPATCHED_JOB_STATES)),
    # The open jobs of a generation, in the order of writers.
    index(
        "ix_jobs_open",
        "generation_id",
        text("coalesce(place, seq)"),
        where=f"{_IS_OPEN} AND generation_id IS NOT NULL",
    ),
    index("ix_jobs_open_twins", "twin_of", where=f"{_IS_OPEN} AND twin_of IS NOT NULL"),
    # A hash, because clients choose the metadata, and a tree refuses long values.
    index(
        "ix_jobs_changes_of",
        text("(metadata ->> 'changes_of')"),
        postgresql_using="hash",
        where=f"{_IS_OPEN} AND metadata ? 'changes_of'",
    ),
    index("ix_jobs_state_seq", "state", "seq"),
    index("ix_jobs_generation_id", "generation_id", where="generation_id IS NOT NULL"),
    index("ix_jobs_twin_of", "twin_of", where="twin_of IS NOT NULL"),
    index("ix_jobs_forget_at", "forget_at", where="forget_at IS NOT NULL"),
    index("ix_jobs_created_at", "created_at"),
    index("ix_jobs_finished_at", "finished_at", where="finished_at IS NOT NULL"),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "1000"},
)

# Each row adds an ended chunk to the counters of its job, and is deleted when the job's own row includes it (see
# counters.py). There is no foreign key, because its check would lock the row that commits must not wait for.
job_increments = Table(
    "job_increments",
    metadata,
    Column("job_id", Uuid, nullable=False),
    Column("num_chunks", Integer, nullable=False),
    count("num_done"),
    count("num_failed"),
    count("num_tokens"),
    count("num_computed_tokens"),
    count("num_truncated"),
    count("num_passages"),
    count("num_reused"),
    Column("stage_seconds", JSONB, nullable=False),
    index("ix_job_increments_job_id", "job_id"),
    postgresql_with={"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "5000"},
)

chunks = Table(
    "chunks",
    metadata,
    serial(),
    Column("job_id", ForeignKey(jobs.c.id, ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    choice("state", CHUNK_STATES),
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
    # Set while the worker was encoding no other chunk: see release_orphaned_chunks in rescue.py.
    flag("is_alone"),
    Column("estimated_tokens", Integer, nullable=False),  # by TokenEstimate in chunk.py
    # The period between two proofs of a worker in which the results were computed (proofs); NULL if unknown.
    Column("proof_id", BigInteger),
    # Its results were computed by a faulty model process and cannot be encoded again (mending.py); NULL means no.
    Column("is_suspect", Boolean),
    # No constraint makes this unique, because that would keep `chunks` from being partitioned by id (decision
    # 0056). A transaction that numbers chunks has created the job itself, or holds the lock of its row.
    index("ix_chunks_job_id_seq", "job_id", "seq"),
    index("ix_chunks_pending", "job_id", "seq", where="state = 'pending'"),
    index("ix_chunks_queued", "queued_at", where="state = 'queued'"),
    # The index is not on lease_until, because each renewal would then update it and every other index of the
    # table. Few chunks are leased at a time.
    index("ix_chunks_held", "job_id", where="state = 'leased'"),
    index("ix_chunks_order", "job_id", "first_item"),
    # Nearly always empty, so that a commit pays nothing for it.
    index("ix_chunks_suspect", "id", where="is_suspect"),
    postgresql_with={
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.05",
    },
)

# Texts and results of chunks lie in partitions by chunk id, which are dropped when no chunk of theirs is left
# (partitions.py). So there is no foreign key: rows of a deleted chunk go with their partition, or are deleted
# singly after a few minutes.
BY_CHUNK = "RANGE (chunk_id)"

chunk_payloads = Table(
    "chunk_payloads",
    metadata,
    Column("chunk_id", BigInteger, primary_key=True, autoincrement=False),
    Column("items", LargeBinary, nullable=False),
    # The position of each item in the order of writers, for rows copied from another generation; NULL if the
    # job's applies.
    Column("places", ARRAY(BigInteger)),
    postgresql_partition_by=BY_CHUNK,
)

chunk_vectors = Table(
    "chunk_vectors",
    metadata,
    Column("chunk_id", BigInteger, primary_key=True, autoincrement=False),
    # Rows [num_items, width] of the job's vector type: see pack_block in vector_types.py.
    Column("vectors", LargeBinary, nullable=False),
    # The token count of each item, int32 [num_items]; NULL for records.
    Column("item_tokens", LargeBinary),
    postgresql_partition_by=BY_CHUNK,
)

chunk_truncations = Table(
    "chunk_truncations",
    metadata,
    Column("chunk_id", BigInteger, primary_key=True, autoincrement=False),
    Column("items", ARRAY(Integer), nullable=False),  # positions in the chunk of items that were cut
    postgresql_partition_by=BY_CHUNK,
)

# The ids of deleted chunks, at most 100 a row, whose texts and results are still to be deleted. A trigger on
# `chunks` adds them.
removed_chunks = Table(
    "removed_chunks",
    metadata,
    Column("chunk_ids", ARRAY(BigInteger), nullable=False),
    moment("due_at", nullable=False),
    index("ix_removed_chunks_due_at", "due_at"),
    postgresql_with={"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "5000"},
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

# Counts of open jobs: a trigger on `jobs` adds rows for what a transaction has changed, negative ones for what
# is no longer so, and the scheduler adds rows up (backlog.py). Nobody waits for a row, and nobody reads `jobs`.
open_job_counts = Table(
    "open_job_counts",
    metadata,
    Column("model", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("generation_id", BigInteger),
    Column("num_jobs", BigInteger, nullable=False),
    # Items without a result and chunks that have not ended, rounded up to 64ths of each job.
    Column("num_items", BigInteger, nullable=False),
    Column("num_chunks", BigInteger, nullable=False),
    postgresql_with={"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "1000"},
)

# The Idempotency-Keys of files, pushes, runs and webhooks, with the id of what each has made. Jobs and
# batches store theirs in their own tables.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("operation", Text, primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("content_hash", LargeBinary, nullable=False),
    # NULL only within the transaction that inserts the row.
    Column("made_id", Text),
    moment("created_at", is_now=True),
    index("ix_idempotency_keys_created_at", "created_at"),
)
