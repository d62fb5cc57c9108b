"""Add the inputs of jobs whose objects an indexer reads."""

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE vectormill.job_inputs (
        id           uuid CONSTRAINT pk_job_inputs PRIMARY KEY
                     CONSTRAINT fk_job_inputs_id REFERENCES vectormill.jobs ON DELETE CASCADE,
        request      jsonb NOT NULL,
        collection   text,
        state        text NOT NULL
                     CONSTRAINT ck_job_inputs_state CHECK (state IN ('waiting', 'reading', 'read', 'failed', 'cancelled')),
        fence        bigint NOT NULL DEFAULT 0,
        attempt      bigint NOT NULL DEFAULT 0,
        available_at timestamptz NOT NULL DEFAULT now(),
        lease_owner  text,
        lease_until  timestamptz,
        error        text,
        num_items    bigint NOT NULL DEFAULT 0,
        num_compared bigint NOT NULL DEFAULT 0
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE INDEX ix_job_inputs_due ON vectormill.job_inputs (available_at) WHERE state IN ('waiting', 'reading')
    """,
)


def upgrade() -> None:
    """Create the table. Of what exists only `jobs` is locked, and only for a moment."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drop the table. Jobs whose objects were not read yet are removed as uploads that were interrupted."""
    op.execute(
        """
        UPDATE vectormill.jobs SET state = 'deleting', idempotency_key = NULL, finished_at = now()
         WHERE state = 'uploading' AND content_hash IS NOT NULL
        """
    )
    op.execute("DROP TABLE vectormill.job_inputs")
