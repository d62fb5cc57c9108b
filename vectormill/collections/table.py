"""Tables of collections, generations, int8 ranges and codebooks of vector spaces, and tombstones.

The tables of results are made at run time: see generation_tables.py.
"""

from sqlalchemy import BigInteger, Column, ForeignKey, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.collections.collection import GENERATION_STATES, INDEX_POLICIES
from vectormill.db.schema import choice, document, flag, index, metadata, moment, serial

collections = Table(
    "collections",
    metadata,
    serial(),
    Column("name", Text, nullable=False, unique=True),
    moment("created_at", is_now=True),
    # If true, texts are kept alongside the results; `language` is the configuration of their full text search.
    flag("keep_text"),
    Column("language", Text, nullable=False, server_default=text("'simple'")),
    choice("index_policy", INDEX_POLICIES, default="auto"),
    document("index_options"),
    # The metadata fields that are indexed in each generation.
    document("filters", "[]"),
)

generations = Table(
    "generations",
    metadata,
    serial(),
    Column("collection_id", ForeignKey(collections.c.id, ondelete="CASCADE"), nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("fingerprint", Text, nullable=False),
    choice("state", GENERATION_STATES),
    moment("created_at", is_now=True),
    moment("live_at"),
    moment("retired_at"),
    # Reports of the generation's canary and of its index: what was chosen and why.
    document("report"),
    # No chunk of the generation's jobs is dispatched before this time: a swap waits for twins in the next generation.
    moment("held_until"),
    # A collection has at most one live generation, which its view reads.
    index("uq_generations_live", "collection_id", unique=True, where="state = 'live'"),
    # At most one generation of a collection is being built.
    index("uq_generations_building", "collection_id", unique=True, where="state = 'building'"),
    index("ix_generations_collection_id", "collection_id"),
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
    index("ix_tombstones_seq", "collection_id", "seq"),
    index("ix_tombstones_unscrubbed", "collection_id", where="scrubbed_at IS NULL"),
)
