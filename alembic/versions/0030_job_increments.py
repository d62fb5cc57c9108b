"""Add what ended chunks add to the counters of their jobs, so that their commits do not wait for each other."""

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE vectormill.job_increments (
        job_id              uuid NOT NULL,
        num_chunks          integer NOT NULL,
        num_done            bigint NOT NULL DEFAULT 0,
        num_failed          bigint NOT NULL DEFAULT 0,
        num_tokens          bigint NOT NULL DEFAULT 0,
        num_computed_tokens bigint NOT NULL DEFAULT 0,
        num_truncated       bigint NOT NULL DEFAULT 0,
        num_passages        bigint NOT NULL DEFAULT 0,
        num_reused          bigint NOT NULL DEFAULT 0,
        stage_seconds       jsonb NOT NULL
    ) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000)
    """,
    "CREATE INDEX ix_job_increments_job_id ON vectormill.job_increments (job_id)",
)


def upgrade() -> None:
    """Create the table, which nobody uses yet."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drop the table. Stop all workers first; the scheduler then adds up what they have noted."""
    op.execute(
        """
        DO $$ BEGIN
            IF EXISTS (SELECT FROM vectormill.job_increments) THEN
                RAISE EXCEPTION 'Commits of workers were not counted yet: stop the workers, and run a scheduler.';
            END IF;
        END $$
        """
    )
    op.execute("DROP TABLE vectormill.job_increments")
