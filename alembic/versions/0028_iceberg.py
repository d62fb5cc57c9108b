"""Add the table of a catalog to which the parts of a job's output are added."""

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add two columns, which locks the table only for a moment."""
    op.execute("ALTER TABLE vectormill.job_outputs ADD COLUMN table_url text, ADD COLUMN table_schema bytea")


def downgrade() -> None:
    """Drop the columns. Outputs that are not closed yet are then closed without being added to their tables."""
    op.execute("ALTER TABLE vectormill.job_outputs DROP COLUMN table_url, DROP COLUMN table_schema")
