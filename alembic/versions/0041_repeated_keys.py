"""Repeated keys: how many items of a job were replaced by a later one with the same key.

Revision ID: 0041
Revises: 0040
"""

from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

TABLES = ("jobs", "job_increments")


def upgrade() -> None:
    """Add the columns, which rewrites nothing."""
    for table in TABLES:
        op.execute(f"ALTER TABLE vectormill.{table} ADD COLUMN num_repeated bigint NOT NULL DEFAULT 0")


def downgrade() -> None:
    """Drop the columns."""
    for table in TABLES:
        op.execute(f"ALTER TABLE vectormill.{table} DROP COLUMN num_repeated")
