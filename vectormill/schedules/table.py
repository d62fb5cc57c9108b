"""The table of schedules."""

from sqlalchemy import Column, ForeignKey, Table, Text

from vectormill.db.schema import SCHEMA, choice, document, index, metadata, moment, serial
from vectormill.schedules.schedule import OVERLAPS

schedules = Table(
    "schedules",
    metadata,
    serial(),
    Column("name", Text, nullable=False, unique=True),
    Column("collection_id", ForeignKey(f"{SCHEMA}.collections.id", ondelete="CASCADE"), nullable=False),
    Column("cron", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    choice("overlap", OVERLAPS),
    # The options of the schedule's runs.
    document("options"),
    moment("next_due_at"),
    moment("paused_at"),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    index("ix_schedules_collection_id", "collection_id"),
    index("ix_schedules_next_due_at", "next_due_at", where="paused_at IS NULL"),
)
