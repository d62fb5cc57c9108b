"""Which launcher a worker belongs to, so that two launchers with one host name do not share a worker's row.

The column may be null, so that workers of the release before go on writing as they did.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("launcher", sa.Uuid(), nullable=True), schema="vectormill")


def downgrade() -> None:
    op.drop_column("workers", "launcher", schema="vectormill")
