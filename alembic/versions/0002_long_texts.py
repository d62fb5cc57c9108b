"""Which items of a job were cut, and into how many passages long ones went.

Both are filled from now on; what earlier releases cut is counted in jobs.num_truncated and not listed.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "jobs",
        sa.Column("num_passages", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        schema="vectormill",
    )
    op.create_table(
        "chunk_truncations",
        sa.Column("chunk_id", sa.BigInteger(), nullable=False),
        sa.Column("items", postgresql.ARRAY(sa.Integer()), nullable=False),
        sa.ForeignKeyConstraint(
            ["chunk_id"],
            ["vectormill.chunks.id"],
            name=op.f("fk_chunk_truncations_chunk_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("chunk_id", name=op.f("pk_chunk_truncations")),
        schema="vectormill",
    )


def downgrade() -> None:
    op.drop_table("chunk_truncations", schema="vectormill")
    op.drop_column("jobs", "num_passages", schema="vectormill")
