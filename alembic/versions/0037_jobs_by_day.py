"""Jobs by day: an index of the moment of submission, by which the console selects jobs.

Revision ID: 0037
Revises: 0036
"""

from alembic import op

from vectormill.db.migrations import build_index

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Build the index, for which nobody waits."""
    build_index("ix_jobs_created_at", "jobs (created_at)")


def downgrade() -> None:
    """Drop the index."""
    op.execute("DROP INDEX vectormill.ix_jobs_created_at")
