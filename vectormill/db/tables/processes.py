"""Processes that give signs of life, and the keys of those who call."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.db.tables.schema import BUSY, metadata, moment, one_of
from vectormill.domain.api_key import SCOPES

workers = Table(
    "workers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("incarnation", Uuid, nullable=False),
    Column("model", Text, nullable=False),
    Column("slots", Integer, nullable=False),
    Column("report", JSONB, nullable=False, server_default=text("'{}'")),
    moment("started_at", is_now=True),
    moment("heartbeat_at", is_now=True),
    # The run of `vectormill worker` that started it: only its next worker may take the name over at once.
    Column("launcher", Uuid),
    Column("max_tokens_in_flight", Integer),  # which it asks for; NULL of a former release
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)

heartbeats = Table(
    "heartbeats",
    metadata,
    Column("duty", Text, primary_key=True),  # see workers.py
    moment("beat_at", is_now=True),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False, unique=True),  # SHA-256 of the secret
    Column("scope", Text, CheckConstraint(one_of("scope", SCOPES), name="scope"), nullable=False),
    moment("created_at", is_now=True),
    moment("expires_at"),
    moment("revoked_at"),
    moment("last_used_at"),  # an hour coarse: a row is not written at every request
    # A name is free again when its key is revoked, so that a secret can be replaced under the same name.
    Index("uq_api_keys_name", "name", unique=True, postgresql_where=text("revoked_at IS NULL")),
)
