"""The table of runs."""

from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, UniqueConstraint, Uuid
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.collections.table import collections, generations
from vectormill.db.schema import BUSY, SCHEMA, choice, count, document, index, lease, metadata, moment, one_of
from vectormill.runs.run import CLAIMED_RUN_STATES, OPEN_RUN_STATES, RUN_KINDS, RUN_PHASES, RUN_STATES

runs = Table(
    "runs",
    metadata,
    Column("id", Uuid, primary_key=True),
    # A number of the sequence jobs.seq, drawn when the run begins to read; writes with a larger number are
    # newer.
    Column("seq", BigInteger),
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), nullable=False),
    choice("kind", RUN_KINDS),
    choice("state", RUN_STATES),
    choice("phase", RUN_PHASES, nullable=True),
    # The generation that the run writes, and its encoding job.
    Column("generation_id", ForeignKey(generations.c.id, ondelete="SET NULL")),
    Column("job_id", Uuid),
    # The requested spec; null means that of the live generation.
    Column("spec", JSONB),
    document("options"),
    count("num_seen"),
    count("num_unchanged"),
    count("num_metadata_only"),
    count("num_new"),
    count("num_changed"),
    count("num_moved"),
    count("num_deleted"),
    count("num_failed"),
    document("report"),
    Column("error", Text),
    Column("schedule_id", ForeignKey(f"{SCHEMA}.schedules.id", ondelete="SET NULL")),
    moment("due_at"),
    *lease(),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    moment("started_at"),
    moment("finished_at"),
    # At most one run per due time, however many schedulers look and however often.
    UniqueConstraint("schedule_id", "due_at"),
    # At most one active run per collection.
    index("uq_runs_running", "collection_id", unique=True, where=one_of("state", CLAIMED_RUN_STATES)),
    index("ix_runs_collection_id", "collection_id", "created_at"),
    index("ix_runs_created_at", "created_at", "id"),
    # The index maintainer asks each collection for its last builds.
    index("ix_runs_builds", "collection_id", "finished_at", where="kind = 'index'"),
    index("ix_runs_schedule_id", "schedule_id", "created_at", where="schedule_id IS NOT NULL"),
    index("ix_runs_open", "available_at", where=one_of("state", OPEN_RUN_STATES)),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)
