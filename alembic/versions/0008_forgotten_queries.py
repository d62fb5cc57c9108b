"""When the job of a search is to be gone, whoever was to remove it.

The column may be null, so that APIs of the release before go on writing as they did.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "jobs", sa.Column("forget_at", sa.DateTime(timezone=True), nullable=True), schema="vectormill"
    )
    op.create_index(
        "ix_jobs_forget_at",
        "jobs",
        ["forget_at"],
        schema="vectormill",
        postgresql_where=sa.text("forget_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_column("jobs", "forget_at", schema="vectormill")
