"""The tables of processes that send heartbeats."""

from sqlalchemy import Column, Integer, Table, Text, Uuid

from vectormill.db.schema import BUSY, document, index, metadata, moment, serial

workers = Table(
    "workers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("incarnation", Uuid, nullable=False),
    Column("model", Text, nullable=False),
    Column("slots", Integer, nullable=False),
    document("report"),
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

# The periods of workers between two proofs, each with what the worker ran (decision 0078). A period without
# `proven_at` and `failed_at` is the current one, or its worker was killed.
proofs = Table(
    "proofs",
    metadata,
    serial(),
    Column("worker", Text, nullable=False),
    Column("incarnation", Uuid, nullable=False),
    Column("model", Text, nullable=False),
    document("report"),
    moment("began_at", is_now=True),
    moment("proven_at"),
    moment("failed_at"),
    Column("reason", Text),
    moment("repaired_at"),
    index("ix_proofs_failed", "id", where="failed_at IS NOT NULL AND repaired_at IS NULL"),
)
