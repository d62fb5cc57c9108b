"""Add codebooks, and to tables of multi-vectors the column of their residual codes."""

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

CREATE = """
    CREATE TABLE vectormill.codebooks (
        fingerprint text CONSTRAINT pk_codebooks PRIMARY KEY,
        digest      bytea NOT NULL,
        content     bytea NOT NULL,
        created_at  timestamptz NOT NULL DEFAULT now()
    )
"""

# Tables of generations are made at run time, so they are found by their names.
ALTER_TABLES = """
    DO $$
    DECLARE found record;
    BEGIN
        FOR found IN
            SELECT table_name FROM information_schema.columns
             WHERE table_schema = 'vectormill' AND column_name = 'multi_vector'
               AND table_name ~ '^generation_[0-9]+(_fill)?$'
        LOOP
            EXECUTE format('ALTER TABLE vectormill.%I {actions}', found.table_name);
        END LOOP;
    END
    $$
"""
# No row is read for the constraint, since multi_vector was never NULL.
ADD = (
    "ALTER multi_vector DROP NOT NULL, ADD multi_vector_codes bytea, "
    "ADD CHECK (num_nonnulls(multi_vector, multi_vector_codes) > 0) NOT VALID"
)


def upgrade() -> None:
    """Create the table and the columns. Each table of multi-vectors is locked for a moment; no row is rewritten."""
    op.execute(CREATE)
    op.execute(ALTER_TABLES.format(actions=ADD))


def downgrade() -> None:
    """Drop the columns and the table. Refused by Postgres if rows have codes, which only a re-index turns back."""
    op.execute(ALTER_TABLES.format(actions="ALTER multi_vector SET NOT NULL, DROP multi_vector_codes"))
    op.execute("DROP TABLE vectormill.codebooks")
