"""The tables of processes that send heartbeats."""

from sqlalchemy import Column, Integer, Table, Text, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB

from vectormill.db.schema import BUSY, metadata, moment

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
    # The launching run of `vectormill worker`: only its next worker may take over the name at once.
    Column("launcher", Uuid),
    Column("max_tokens_in_flight", Integer),  # the limit that the worker asks for; NULL while its model loads
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)

heartbeats = Table(
    "heartbeats",
    metadata,
    Column("duty", Text, primary_key=True),  # see workers.py
    moment("beat_at", is_now=True),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)
