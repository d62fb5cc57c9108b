"""The table of schedules."""

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Identity, Index, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.db.schema import SCHEMA, metadata, moment, one_of
from vectormill.schedules.schedule import OVERLAPS

schedules = Table(
    "schedules",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("collection_id", ForeignKey(f"{SCHEMA}.collections.id", ondelete="CASCADE"), nullable=False),
    Column("cron", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    Column("overlap", Text, CheckConstraint(one_of("overlap", OVERLAPS), name="overlap"), nullable=False),
    # The options of the schedule's runs.
    Column("options", JSONB, nullable=False, server_default=text("'{}'")),
    moment("next_due_at"),
    moment("paused_at"),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    Index("ix_schedules_collection_id", "collection_id"),
    Index("ix_schedules_next_due_at", "next_due_at", postgresql_where=text("paused_at IS NULL")),
)
