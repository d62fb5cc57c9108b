"""Let keys have the scopes sources and webhooks. An API of a former release serves such a key nothing."""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

LIMIT = "ALTER TABLE vectormill.api_keys ADD CONSTRAINT ck_api_keys_scope CHECK (scope IN ({}))"


def upgrade() -> None:
    op.execute("ALTER TABLE vectormill.api_keys DROP CONSTRAINT ck_api_keys_scope")
    op.execute(LIMIT.format("'read', 'write', 'sources', 'webhooks', 'admin'"))


def downgrade() -> None:
    op.execute("ALTER TABLE vectormill.api_keys DROP CONSTRAINT ck_api_keys_scope")
    op.execute("UPDATE vectormill.api_keys SET scope = 'write' WHERE scope IN ('sources', 'webhooks')")
    op.execute(LIMIT.format("'read', 'write', 'admin'"))
