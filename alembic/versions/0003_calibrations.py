"""Calibrations of int8 vectors"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "calibrations",
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("ranges", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_calibrations")),
        schema="vectormill",
    )


def downgrade() -> None:
    op.drop_table("calibrations", schema="vectormill")
