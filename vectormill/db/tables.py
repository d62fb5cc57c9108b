"""The static tables, in the schema `vectormill`. Vector tables are made at run time: see vectors.py.

States are TEXT with a CHECK, never ENUM: adding one must not need a lock. Columns of `chunks` that change with every
claim leave room in the page (fillfactor) so that most updates stay on it.
"""

from collections.abc import Sequence

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from vectormill.domain.api_key import SCOPES
from vectormill.domain.chunk import CHUNK_STATES
from vectormill.domain.collection import GENERATION_STATES
from vectormill.domain.job import DELETING, JOB_STATES

SCHEMA = "vectormill"

# Of tables with few rows, which change every second: room in the page for the next version of a row, so that no index
# is touched, and vacuum by the number of changes.
_BUSY = {"fillfactor": "50", "autovacuum_vacuum_scale_factor": "0"}

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    },
)


def _one_of(column: str, values: Sequence[str]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def _moment(name: str, *, nullable: bool = True, is_now: bool = False) -> Column[object]:
    default = func.now() if is_now else None
    return Column(name, DateTime(timezone=True), nullable=nullable and not is_now, server_default=default)


def _count(name: str, kind: type[BigInteger] | type[Integer] = BigInteger) -> Column[int]:
    return Column(name, kind, nullable=False, server_default=text("0"))


collections = Table(
    "collections",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    _moment("created_at", is_now=True),
)

generations = Table(
    "generations",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("state", Text, CheckConstraint(_one_of("state", GENERATION_STATES), name="state"), nullable=False),
    _moment("created_at", is_now=True),
    # A collection has at most one live generation: the one its view reads.
    Index("uq_generations_live", "collection_id", unique=True, postgresql_where=text("state = 'live'")),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid, primary_key=True),
    # Orders writers: a row of a collection is never overwritten by a job with a smaller seq.
    Column("seq", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column(
        "state",
        Text,
        CheckConstraint(_one_of("state", (*JOB_STATES, DELETING)), name="state"),
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
    _count("num_items"),
    _count("num_done"),
    _count("num_failed"),
    _count("num_chunks", Integer),
    # The finisher is the transaction that brings this to zero.
    _count("num_open_chunks", Integer),
    _count("num_retried_chunks", Integer),
    _count("num_tokens"),
    _count("num_computed_tokens"),
    _count("num_truncated"),
    Column("stage_seconds", JSONB, nullable=False, server_default=text("'{}'")),
    _moment("created_at", is_now=True),
    _moment("updated_at", is_now=True),
    _moment("started_at"),
    _moment("finished_at"),
    _count("num_passages"),
    _count("num_reused"),
    _moment("paused_at"),
    # Since started_at, while the job was paused or had ended before a retry: nobody was to work on it.
    Column("idle_seconds", Double, nullable=False, server_default=text("0")),
    # Of the job of a search: nobody asks for it any more, whether or not its API has removed it.
    _moment("forget_at"),
    # The dispatcher and the reaper look at jobs in progress many times a second; nearly all jobs are ended ones.
    Index(
        "ix_jobs_in_progress",
        "model",
        "priority",
        "seq",
        postgresql_where=text("state IN ('uploading', 'queued', 'running', 'paused', 'cancelling')"),
    ),
    Index("ix_jobs_state_seq", "state", "seq"),
    Index("ix_jobs_forget_at", "forget_at", postgresql_where=text("forget_at IS NOT NULL")),
    Index("ix_jobs_finished_at", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
    postgresql_with=_BUSY | {"autovacuum_vacuum_threshold": "1000"},
)

chunks = Table(
    "chunks",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("job_id", ForeignKey(jobs.c.id, ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("state", Text, CheckConstraint(_one_of("state", CHUNK_STATES), name="state"), nullable=False),
    Column("first_item", BigInteger, nullable=False),  # position in the job of the chunk's first item
    Column("num_items", Integer, nullable=False),
    # Set by a retry: only these positions within the chunk are encoded.
    Column("only_items", ARRAY(Integer)),
    _count("fence"),
    _count("attempt", Integer),
    _count("lost", Integer),
    _count("dispatch_seq", Integer),
    _moment("available_at", is_now=True),
    _moment("queued_at"),
    Column("lease_owner", Text),
    _moment("lease_until"),
    Column("parent_id", BigInteger),
    Column("error", Text),
    _count("lapsed", Integer),
    # Nothing else was being encoded by its worker: see bereavements.py.
    Column("is_alone", Boolean, nullable=False, server_default=text("false")),
    UniqueConstraint("job_id", "seq"),
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
)

chunk_vectors = Table(
    "chunk_vectors",
    metadata,
    Column("chunk_id", ForeignKey(chunks.c.id, ondelete="CASCADE"), primary_key=True),
    # Rows [num_items, width] of the job's vector type: see pack_block in vector_types.py.
    Column("vectors", LargeBinary, nullable=False),
)

chunk_truncations = Table(
    "chunk_truncations",
    metadata,
    Column("chunk_id", ForeignKey(chunks.c.id, ondelete="CASCADE"), primary_key=True),
    Column("items", ARRAY(Integer), nullable=False),  # positions in the chunk of items that were cut
)

calibrations = Table(
    "calibrations",
    metadata,
    # Of an EncodingSpec: it names the vector space whose int8 codes these ranges explain.
    Column("fingerprint", Text, primary_key=True),
    # float32, little-endian, [2, dimensions]: the smallest and the largest value of each dimension.
    Column("ranges", LargeBinary, nullable=False),
    _moment("created_at", is_now=True),
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

workers = Table(
    "workers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("incarnation", Uuid, nullable=False),
    Column("model", Text, nullable=False),
    Column("slots", Integer, nullable=False),
    Column("report", JSONB, nullable=False, server_default=text("'{}'")),
    _moment("started_at", is_now=True),
    _moment("heartbeat_at", is_now=True),
    # The run of `vectormill worker` that started it: only its next worker may take the name over at once.
    Column("launcher", Uuid),
    postgresql_with=_BUSY | {"autovacuum_vacuum_threshold": "500"},
)

heartbeats = Table(
    "heartbeats",
    metadata,
    Column("duty", Text, primary_key=True),  # see workers.py
    _moment("beat_at", is_now=True),
    postgresql_with=_BUSY | {"autovacuum_vacuum_threshold": "500"},
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, unique=True),  # SHA-256 of the secret
    Column("scope", Text, CheckConstraint(_one_of("scope", SCOPES), name="scope"), nullable=False),
    _moment("created_at", is_now=True),
    _moment("expires_at"),
    _moment("revoked_at"),
    _moment("last_used_at"),  # an hour coarse: a row is not written at every request
    # A name is free again when its key is revoked, so that a secret can be replaced under the same name.
    Index("uq_api_keys_name", "name", unique=True, postgresql_where=text("revoked_at IS NULL")),
)

__all__ = ["SCHEMA", "metadata"]
