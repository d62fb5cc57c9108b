"""The tables of webhooks and their deliveries. Triggers on jobs and runs insert deliveries (migration
webhooks).

A delivery has no foreign key: a commit that ends a job must neither fail nor wait because a webhook is being
deleted.
"""

from sqlalchemy import BigInteger, Boolean, Column, Integer, Table, Text, Uuid, func, text
from sqlalchemy.dialects.postgresql import ARRAY

from vectormill.db.schema import BUSY, choice, count, index, metadata, moment, serial
from vectormill.webhooks.webhook import DELIVERY_STATES

webhooks = Table(
    "webhooks",
    metadata,
    serial(),
    Column("url", Text, nullable=False),
    Column("description", Text, nullable=False, server_default=text("''")),
    Column("events", ARRAY(Text), nullable=False),
    # Not hashed, since both sides compute signatures with it.
    Column("secret", Text, nullable=False),
    Column("former_secret", Text),
    moment("former_secret_until"),
    Column("is_enabled", Boolean, nullable=False, server_default=text("true")),
    Column("disabled_reason", Text),
    # The time of the first failure since the last success.
    moment("failing_since"),
    moment("last_failed_at"),
    count("num_delivered"),
    count("num_refused"),  # attempts that failed
    count("num_failed"),  # deliveries that failed for good
    moment("created_at", is_now=True),
    moment("updated_at", is_now=True),
    postgresql_with=BUSY | {"autovacuum_vacuum_threshold": "500"},
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    serial(),
    Column("webhook_id", BigInteger, nullable=False),
    # The same at every attempt, so that a receiver recognizes duplicates.
    Column("event_id", Uuid, nullable=False, server_default=func.gen_random_uuid()),
    Column("event_type", Text, nullable=False),
    Column("payload", Text, nullable=False),  # the bytes that are signed and sent
    choice("state", DELIVERY_STATES, default="pending"),
    count("fence"),
    count("num_attempts", Integer),
    Column("lease_owner", Text),
    moment("lease_until"),
    Column("status_code", Integer),
    Column("error", Text),
    # When the next attempt is due, or when the attempt in progress was due.
    Column("due_at", moment("due_at").type, server_default=func.now()),
    moment("attempted_at"),
    moment("ended_at"),
    moment("created_at", is_now=True),
    index("ix_webhook_deliveries_webhook_id", "webhook_id", "id"),
    index("ix_webhook_deliveries_state", "webhook_id", "state", "id"),
    index("ix_webhook_deliveries_created_at", "created_at"),
    index("ix_webhook_deliveries_due", "webhook_id", "due_at", where="state = 'pending'"),
)
