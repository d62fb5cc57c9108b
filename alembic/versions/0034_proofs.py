"""Add periods between proofs of workers, and for each chunk the period in which it was computed."""

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE vectormill.proofs (
        id          bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_proofs PRIMARY KEY,
        worker      text NOT NULL,
        incarnation uuid NOT NULL,
        model       text NOT NULL,
        report      jsonb NOT NULL DEFAULT '{}',
        began_at    timestamptz NOT NULL DEFAULT now(),
        proven_at   timestamptz,
        failed_at   timestamptz,
        reason      text,
        repaired_at timestamptz
    )
    """,
    """
    CREATE INDEX ix_proofs_failed ON vectormill.proofs (id) WHERE failed_at IS NOT NULL AND repaired_at IS NULL
    """,
    # Without a default no row is rewritten. Workers of the previous release leave it NULL.
    "ALTER TABLE vectormill.chunks ADD COLUMN proof_id bigint",
)


def upgrade() -> None:
    """Create the table and the column. `chunks` is locked for a moment."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drop the column and the table."""
    op.execute("ALTER TABLE vectormill.chunks DROP COLUMN proof_id")
    op.execute("DROP TABLE vectormill.proofs")
