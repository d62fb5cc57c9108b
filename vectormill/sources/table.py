"""The tables of sources: each collection's source, parts of pushes, and changed keys of followed tables."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.collections.table import collections
from vectormill.db.schema import metadata, moment, one_of
from vectormill.runs.table import runs
from vectormill.sources.source import SOURCE_KINDS

sources = Table(
    "sources",
    metadata,
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), primary_key=True),
    Column("kind", Text, CheckConstraint(one_of("kind", SOURCE_KINDS), name="kind"), nullable=False),
    # Never contains a secret: database credentials are named here and read on the machine that reads the
    # source.
    Column("options", JSONB, nullable=False, server_default=text("'{}'")),
    Column("split", JSONB, nullable=False, server_default=text("'{}'")),
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
)

run_parts = Table(
    "run_parts",
    metadata,
    # Rows that a client pushed, in parts and in order; see pushes.py.
    Column("run_id", ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("num_items", Integer, nullable=False),
    Column("items", LargeBinary, nullable=False),
)

source_changes = Table(
    "source_changes",
    metadata,
    # Written by triggers on a user's own table, in the transaction that changed the row; only keys are
    # stored.
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    # There is no foreign key, because it would make each of the user's transactions lock the collection's
    # row.
    Column("collection_id", BigInteger, nullable=False),
    Column("key", Text, nullable=False),
    moment("changed_at", is_now=True),
    Index("ix_source_changes_collection_id", "collection_id", "id"),
)
