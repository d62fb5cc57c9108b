"""How many tokens a chunk has, about, and how many a worker wants on their way: the dispatcher counts in tokens.

Neither has a value for what a former release writes: such a chunk is estimated by its items, and such a worker is given
as many chunks as it has slots.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("chunks", sa.Column("estimated_tokens", sa.Integer()), schema="vectormill")
    op.add_column("workers", sa.Column("max_tokens_in_flight", sa.Integer()), schema="vectormill")


def downgrade() -> None:
    op.drop_column("workers", "max_tokens_in_flight", schema="vectormill")
    op.drop_column("chunks", "estimated_tokens", schema="vectormill")
