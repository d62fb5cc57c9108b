"""Joining: the staged parts that become the next part of an output.

Revision ID: 0040
Revises: 0039
"""

from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, which rewrites nothing."""
    op.execute("ALTER TABLE vectormill.job_outputs ADD COLUMN joining text[]")
    op.execute(
        "COMMENT ON COLUMN vectormill.job_outputs.joining IS 'The staged parts that become the next part.'"
    )


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE vectormill.job_outputs DROP COLUMN joining")
