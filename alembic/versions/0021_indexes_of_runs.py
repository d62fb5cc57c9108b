"""Index what schedules, generations and deletions look up, and note when a webhook failed last."""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

MAKE = (
    "CREATE INDEX ix_jobs_generation_id ON vectormill.jobs (generation_id) WHERE generation_id IS NOT NULL",
    "CREATE INDEX ix_runs_schedule_id ON vectormill.runs (schedule_id, created_at) WHERE schedule_id IS NOT NULL",
    "CREATE INDEX ix_tombstones_seq ON vectormill.tombstones (collection_id, seq)",
    "ALTER TABLE vectormill.webhooks ADD COLUMN last_failed_at TIMESTAMP WITH TIME ZONE",
)


def upgrade() -> None:
    for statement in MAKE:
        op.execute(statement)


def downgrade() -> None:
    op.execute("ALTER TABLE vectormill.webhooks DROP COLUMN last_failed_at")
    for index in ("ix_tombstones_seq", "ix_runs_schedule_id", "ix_jobs_generation_id"):
        op.execute(f"DROP INDEX vectormill.{index}")
