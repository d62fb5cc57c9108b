"""Pace: two marks of a job's progress, from which its recent rate follows.

Revision ID: 0039
Revises: 0038
"""

from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, without a default, so that no row is rewritten."""
    op.execute("ALTER TABLE vectormill.jobs ADD COLUMN pace double precision[]")
    op.execute("""
        COMMENT ON COLUMN vectormill.jobs.pace IS
        'Seconds and ended items at two earlier commits, without pauses; the later one is two minutes old at most.'
    """)


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE vectormill.jobs DROP COLUMN pace")
