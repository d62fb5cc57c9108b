"""Suspect chunks: those of a faulty worker that cannot be encoded again are marked, and found by an index.

Revision ID: 0035
Revises: 0034
"""

from alembic import op

from vectormill.db.migrations import build_index

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, without a default, so that no row is rewritten, and an index of no rows, which reads all once."""
    op.execute("ALTER TABLE vectormill.chunks ADD COLUMN IF NOT EXISTS is_suspect boolean")
    build_index("ix_chunks_suspect", "chunks (id) WHERE is_suspect")


def downgrade() -> None:
    """Drop the index and the column."""
    op.execute("DROP INDEX vectormill.ix_chunks_suspect")
    op.execute("ALTER TABLE vectormill.chunks DROP COLUMN is_suspect")
