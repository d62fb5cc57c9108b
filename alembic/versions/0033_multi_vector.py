"""Add the type in which a commit sends the multi-vectors of many rows, since an array of arrays cannot be sent."""

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the type. Nothing is locked."""
    op.execute("CREATE TYPE vectormill.multi_vector AS (items halfvec[])")


def downgrade() -> None:
    """Drop the type, which no table uses."""
    op.execute("DROP TYPE vectormill.multi_vector")
