"""Secrets: the key by which questions and answers are signed that go through Redis.

Revision ID: 0042
Revises: 0041
"""

from alembic import op

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, with a random key of 244 bits.

    Where a scheduler has run, processes of the former release, which sign nothing, have a day to be replaced.
    """
    op.execute("""
        CREATE TABLE vectormill.secrets (
            name text PRIMARY KEY,
            value bytea NOT NULL,
            required_from timestamptz NOT NULL
        )
    """)
    op.execute("COMMENT ON TABLE vectormill.secrets IS 'Keys that the processes of this installation share.'")
    op.execute(
        "COMMENT ON COLUMN vectormill.secrets.required_from IS "
        "'Until then messages without a signature are taken, for processes of the release before.'"
    )
    op.execute("""
        INSERT INTO vectormill.secrets (name, value, required_from)
        SELECT 'queries', sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
               now() + make_interval(days => CASE WHEN EXISTS (SELECT FROM vectormill.heartbeats) THEN 1 ELSE 0 END)
    """)


def downgrade() -> None:
    """Drop the table."""
    op.execute("DROP TABLE vectormill.secrets")
