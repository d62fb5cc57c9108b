"""Collections, their generations, and what the vectors of a space share. Vector tables: see vectors.py."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.collections.collection import GENERATION_STATES, INDEX_POLICIES
from vectormill.db.schema import metadata, moment, one_of

collections = Table(
    "collections",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    moment("created_at", is_now=True),
    # Whether texts are kept beside the vectors, and in which language full text search reads them.
    Column("keep_text", Boolean, nullable=False, server_default=text("false")),
    Column("language", Text, nullable=False, server_default=text("'simple'")),
    Column(
        "index_policy",
        Text,
        CheckConstraint(one_of("index_policy", INDEX_POLICIES), name="index_policy"),
        nullable=False,
        server_default=text("'auto'"),
    ),
    Column("index_options", JSONB, nullable=False, server_default=text("'{}'")),
    # Fields of the metadata that have an index in each generation.
    Column("filters", JSONB, nullable=False, server_default=text("'[]'")),
)

generations = Table(
    "generations",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("state", Text, CheckConstraint(one_of("state", GENERATION_STATES), name="state"), nullable=False),
    moment("created_at", is_now=True),
    moment("live_at"),
    moment("retired_at"),
    # The report of its canary and of its index: what was chosen and why.
    Column("report", JSONB, nullable=False, server_default=text("'{}'")),
    # Until then no chunk of its jobs is dispatched: a swap waits for their twins in the next generation.
    moment("held_until"),
    # A collection has at most one live generation: the one its view reads.
    Index("uq_generations_live", "collection_id", unique=True, postgresql_where=text("state = 'live'")),
    # At most one is being built beside the live one.
    Index(
        "uq_generations_building", "collection_id", unique=True, postgresql_where=text("state = 'building'")
    ),
)

calibrations = Table(
    "calibrations",
    metadata,
    # The fingerprint of an EncodingSpec: it names the vector space whose int8 codes these ranges explain.
    Column("fingerprint", Text, primary_key=True),
    # float32, little-endian, [2, dimensions]: the smallest and the largest value of each dimension.
    Column("ranges", LargeBinary, nullable=False),
    moment("created_at", is_now=True),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    # A number of the sequence jobs.seq: a job with a smaller one does not bring the key back.
    Column("seq", BigInteger, nullable=False),
    moment("deleted_at", is_now=True),
    # When no payload of a job held its text any more.
    moment("scrubbed_at"),
    Index("ix_tombstones_seq", "collection_id", "seq"),
    Index("ix_tombstones_unscrubbed", "collection_id", postgresql_where=text("scrubbed_at IS NULL")),
)
