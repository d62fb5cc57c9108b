"""Which chunk was encoded alone when its worker's process ended; and how tables are kept that change all the time.

The column has a default, so that workers of the release before go on.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "chunks",
        sa.Column("is_alone", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        schema="vectormill",
    )


def downgrade() -> None:
    op.drop_column("chunks", "is_alone", schema="vectormill")
