"""Tables of collections, generations, int8 ranges and codebooks of vector spaces, and tombstones.

The tables of results are made at run time: see generation_tables.py.
"""

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
    # If true, texts are kept alongside the results; `language` is the configuration of their full text search.
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
    # The metadata fields that are indexed in each generation.
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
    # Reports of the generation's canary and of its index: what was chosen and why.
    Column("report", JSONB, nullable=False, server_default=text("'{}'")),
    # No chunk of the generation's jobs is dispatched before this time: a swap waits for twins in the next generation.
    moment("held_until"),
    # A collection has at most one live generation, which its view reads.
    Index("uq_generations_live", "collection_id", unique=True, postgresql_where=text("state = 'live'")),
    # At most one generation of a collection is being built.
    Index(
        "uq_generations_building", "collection_id", unique=True, postgresql_where=text("state = 'building'")
    ),
    Index("ix_generations_collection_id", "collection_id"),
)

calibrations = Table(
    "calibrations",
    metadata,
    # The fingerprint of an EncodingSpec, which names the vector space whose int8 codes have these ranges.
    Column("fingerprint", Text, primary_key=True),
    # float32, little-endian, [2, dimensions]: the smallest and the largest value of each dimension.
    Column("ranges", LargeBinary, nullable=False),
    moment("created_at", is_now=True),
)

# A codebook is written once for a vector space, and never changed: rows have codes that mean nothing without it.
codebooks = Table(
    "codebooks",
    metadata,
    # The fingerprint of the EncodingSpec that gives multi-vectors alone.
    Column("fingerprint", Text, primary_key=True),
    # A hash of the content, with which the codes of each row begin.
    Column("digest", LargeBinary, nullable=False),
    Column("content", LargeBinary, nullable=False),
    moment("created_at", is_now=True),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    # A number from the sequence of jobs.seq: a job with a smaller number does not write the key again.
    Column("seq", BigInteger, nullable=False),
    moment("deleted_at", is_now=True),
    # The time from which no job's payload held the item's text any more.
    moment("scrubbed_at"),
    Index("ix_tombstones_seq", "collection_id", "seq"),
    Index("ix_tombstones_unscrubbed", "collection_id", postgresql_where=text("scrubbed_at IS NULL")),
)
