"""The table of runs."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.collections.table import collections, generations
from vectormill.db.schema import BUSY, SCHEMA, count, metadata, moment, one_of
from vectormill.runs.run import CLAIMED_RUN_STATES, OPEN_RUN_STATES, RUN_KINDS, RUN_PHASES, RUN_STATES

runs = Table(
    "runs",
    metadata,
    Column("id", Uuid, primary_key=True),
    # A number of the sequence jobs.seq, drawn when the run begins to read; writes with a larger number are
    # newer.
    Column("seq", BigInteger),
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), nullable=False),
    Column("kind", Text, CheckConstraint(one_of("kind", RUN_KINDS), name="kind"), nullable=False),
    Column("state", Text, CheckConstraint(one_of("state", RUN_STATES), name="state"), nullable=False),
    Column("phase", Text, CheckConstraint(one_of("phase", RUN_PHASES), name="phase")),
    # The generation that the run writes, and its encoding job.
    Column("generation_id", ForeignKey(generations.c.id, ondelete="SET NULL")),
    Column("job_id", Uuid),
    # The requested spec; null means that of the live generation.
    Column("spec", JSONB),
    Column("options", JSONB, nullable=False, server_default=text("'{}'")),
    count("num_seen"),
    count("num_unchanged"),
    count("num_metadata_only"),
    count("num_new"),
    count("num_changed"),
    count("num_moved"),
    count("num_deleted"),
    count("num_failed"),
    Column("report", JSONB, nullable=False, server_default=text("'{}'")),
    Column("error", Text),
    Column("schedule_id", ForeignKey(f"{SCHEMA}.schedules.id", ondelete="SET NULL")),
    moment("due_at"),
    count("fence"),
    count("attempt", Integer),
    Column("lease_owner", Text),
    moment("lease_until"),
    moment("available_at", is_now=True),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    moment("started_at"),
    moment("finished_at"),
    # At most one run per due time, however many schedulers look and however often.
    UniqueConstraint("schedule_id", "due_at"),
    # At most one active run per collection.
    Index(
        "uq_runs_running",
        "collection_id",
        unique=True,
        postgresql_where=text(one_of("state", CLAIMED_RUN_STATES)),
    ),
    Index("ix_runs_collection_id", "collection_id", "created_at"),
    Index("ix_runs_created_at", "created_at", "id"),
    # The index maintainer asks each collection for its last builds.
    Index("ix_runs_builds", "collection_id", "finished_at", postgresql_where=text("kind = 'index'")),
    Index(
        "ix_runs_schedule_id", "schedule_id", "created_at", postgresql_where=text("schedule_id IS NOT NULL")
    ),
    Index(
        "ix_runs_open",
        "available_at",
        postgresql_where=text(one_of("state", OPEN_RUN_STATES)),
    ),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)
