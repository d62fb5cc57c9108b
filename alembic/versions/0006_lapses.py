"""Lapsed leases are counted apart from losses, and a renewal touches no index.

The column has a default, so that workers of the release before go on. Their statements need no index on lease_until:
few chunks are leased at a time, and the new index finds these.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

LEASED = sa.text("state = 'leased'")


def upgrade() -> None:
    op.add_column(
        "chunks",
        sa.Column("lapsed", sa.Integer(), server_default=sa.text("0"), nullable=False),
        schema="vectormill",
    )
    op.create_index("ix_chunks_held", "chunks", ["job_id"], schema="vectormill", postgresql_where=LEASED)
    op.drop_index("ix_chunks_leased", table_name="chunks", schema="vectormill", postgresql_where=LEASED)


def downgrade() -> None:
    op.create_index(
        "ix_chunks_leased", "chunks", ["lease_until"], schema="vectormill", postgresql_where=LEASED
    )
    op.drop_index("ix_chunks_held", table_name="chunks", schema="vectormill", postgresql_where=LEASED)
    op.drop_column("chunks", "lapsed", schema="vectormill")
