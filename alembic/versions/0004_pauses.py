"""Pauses of jobs, and texts whose vector was taken over from an equal one.

Every column has a default or may be null, so that workers of the release before go on writing as they did.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    columns: tuple[sa.Column[Any], ...] = (
        sa.Column("num_reused", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("paused_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("idle_seconds", sa.Double(), server_default=sa.text("0"), nullable=False),
    )
    for column in columns:
        op.add_column("jobs", column, schema="vectormill")


def downgrade() -> None:
    # No earlier release can let a paused job go on.
    op.execute("UPDATE vectormill.jobs SET state = 'queued' WHERE state = 'paused'")
    for name in ("idle_seconds", "paused_at", "num_reused"):
        op.drop_column("jobs", name, schema="vectormill")
