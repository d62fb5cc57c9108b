"""Keep what the Idempotency-Keys of files, pushes, runs and webhooks have made. A former release makes them without."""

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

MAKE = (
    """
    CREATE TABLE vectormill.idempotency_keys (
        operation TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        content_hash BYTEA NOT NULL,
        made_id TEXT,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        CONSTRAINT pk_idempotency_keys PRIMARY KEY (operation, idempotency_key)
    )
    """,
    "CREATE INDEX ix_idempotency_keys_created_at ON vectormill.idempotency_keys (created_at)",
)


def upgrade() -> None:
    for statement in MAKE:
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE vectormill.idempotency_keys")
