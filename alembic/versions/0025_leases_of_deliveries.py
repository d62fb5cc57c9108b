"""Give webhooks' deliveries an owner and an end of their lease, as every other table of leased work has them.

Nothing else changes, so processes of the release before go on beside this one. They look at `due_at` alone, and set it
to the end of the lease when they claim; this release does so too, so that neither takes what the other holds.
"""

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        ALTER TABLE vectormill.webhook_deliveries
            ADD COLUMN lease_owner TEXT,
            ADD COLUMN lease_until TIMESTAMP WITH TIME ZONE
    """)


def downgrade() -> None:
    op.execute("ALTER TABLE vectormill.webhook_deliveries DROP COLUMN lease_owner, DROP COLUMN lease_until")
