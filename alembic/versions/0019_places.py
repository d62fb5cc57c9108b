"""Places in the order of writers: that of a twin is its original's, and rows that a build carries keep their own.

A worker of a former release does not read them: what it writes of twins and of builds has the place of its job's seq.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("place", sa.BigInteger()), schema="vectormill")
    op.add_column("chunk_payloads", sa.Column("places", ARRAY(sa.BigInteger())), schema="vectormill")


def downgrade() -> None:
    op.drop_column("chunk_payloads", "places", schema="vectormill")
    op.drop_column("jobs", "place", schema="vectormill")
