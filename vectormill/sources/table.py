"""The tables of sources: each collection's source, parts of pushes, and changed keys of followed tables."""

from sqlalchemy import BigInteger, Column, ForeignKey, Integer, LargeBinary, Table, Text

from vectormill.collections.table import collections
from vectormill.db.schema import choice, document, index, metadata, moment, serial
from vectormill.runs.table import runs
from vectormill.sources.source import SOURCE_KINDS

sources = Table(
    "sources",
    metadata,
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), primary_key=True),
    choice("kind", SOURCE_KINDS),
    # Never contains a secret: database credentials are named here and read on the machine that reads the
    # source.
    document("options"),
    document("split"),
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
    serial(),
    # There is no foreign key, because it would make each of the user's transactions lock the collection's
    # row.
    Column("collection_id", BigInteger, nullable=False),
    Column("key", Text, nullable=False),
    moment("changed_at", is_now=True),
    index("ix_source_changes_collection_id", "collection_id", "id"),
)
