"""Let jobs of a live generation be held back for a moment, so that the twins in the next one catch up before a swap."""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE vectormill.generations ADD COLUMN held_until timestamptz")


def downgrade() -> None:
    op.execute("ALTER TABLE vectormill.generations DROP COLUMN held_until")
