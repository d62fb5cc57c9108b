"""Divide the texts and results of chunks into partitions by chunk id, which are dropped when their jobs are gone."""

from alembic import op
from sqlalchemy import text

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

TABLES = ("chunk_payloads", "chunk_vectors", "chunk_truncations")

# The first partition holds what is there. It ends one or two spans further on, so that chunks can be submitted
# meanwhile.
FIND_END = text("""
    SELECT CASE WHEN is_called THEN (last_value / 131072 + 2) * 131072 ELSE 131072 END FROM vectormill.chunks_id_seq
""")

# Rows are read for the CHECK while others read and write, so that attaching the table reads none.
CHECK = (
    """
    ALTER TABLE vectormill.{table} DROP CONSTRAINT IF EXISTS closing,
        ADD CONSTRAINT closing CHECK (chunk_id < {end}) NOT VALID
    """,
    "ALTER TABLE vectormill.{table} VALIDATE CONSTRAINT closing",
)

ATTACH = (
    "ALTER TABLE vectormill.{table} DROP CONSTRAINT fk_{table}_chunk_id",
    "ALTER TABLE vectormill.{table} RENAME TO {table}_to_{end}",
    "ALTER TABLE vectormill.{table}_to_{end} RENAME CONSTRAINT pk_{table} TO {table}_to_{end}_pkey",
    """
    CREATE TABLE vectormill.{table} (LIKE vectormill.{table}_to_{end},
        CONSTRAINT pk_{table} PRIMARY KEY (chunk_id)) PARTITION BY RANGE (chunk_id)
    """,
    """
    ALTER TABLE vectormill.{table} ATTACH PARTITION vectormill.{table}_to_{end}
        FOR VALUES FROM (MINVALUE) TO ({end})
    """,
    "CREATE TABLE vectormill.{table}_default PARTITION OF vectormill.{table} DEFAULT",
    "ALTER TABLE vectormill.{table}_to_{end} DROP CONSTRAINT closing",
)

# A statement that joins these tables with chunks opens every partition each time, or is planned anew as a whole. A call of
# this function plans a single look-up instead.
FIND_CONTENT = """
    CREATE FUNCTION vectormill.{function}(wanted bigint) RETURNS SETOF vectormill.{table}
        LANGUAGE plpgsql STABLE ROWS 1
        SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan AS $$
    BEGIN
        RETURN QUERY SELECT * FROM vectormill.{table} WHERE chunk_id = wanted;
    END $$
"""
FUNCTIONS = {"payload_of": "chunk_payloads", "vectors_of": "chunk_vectors"}

# Nothing is deleted by cascade any more: the ids of deleted chunks are noted, and the pruner deletes what their
# partitions still have. A large job has some minutes in which its partitions may be dropped as a whole.
NOTES = (
    """
    CREATE TABLE vectormill.removed_chunks (
        chunk_ids bigint[] NOT NULL,
        due_at    timestamptz NOT NULL
    ) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000)
    """,
    "CREATE INDEX ix_removed_chunks_due_at ON vectormill.removed_chunks (due_at)",
    """
    CREATE FUNCTION vectormill.note_removed_chunks() RETURNS trigger LANGUAGE plpgsql
        SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        INSERT INTO vectormill.removed_chunks (chunk_ids, due_at)
        SELECT array_agg(id ORDER BY id), now() + CASE WHEN count(*) < 100 THEN interval '0' ELSE interval '10 minutes' END
          FROM (SELECT id, row_number() OVER (ORDER BY id) AS place FROM removed) AS numbered
         GROUP BY (place - 1) / 100;
        RETURN NULL;
    END $$
    """,
    "REVOKE ALL ON FUNCTION vectormill.note_removed_chunks() FROM PUBLIC",
    """
    CREATE TRIGGER note_removed_chunks AFTER DELETE ON vectormill.chunks REFERENCING OLD TABLE AS removed
        FOR EACH STATEMENT EXECUTE FUNCTION vectormill.note_removed_chunks()
    """,
)

RESTORE = (
    "CREATE TABLE vectormill.former (LIKE vectormill.{table})",
    """
    INSERT INTO vectormill.former SELECT * FROM vectormill.{table} AS kept
     WHERE EXISTS (SELECT FROM vectormill.chunks WHERE id = kept.chunk_id)
    """,
    "DROP TABLE vectormill.{table}",
    "ALTER TABLE vectormill.former RENAME TO {table}",
    """
    ALTER TABLE vectormill.{table} ADD CONSTRAINT pk_{table} PRIMARY KEY (chunk_id),
        ADD CONSTRAINT fk_{table}_chunk_id FOREIGN KEY (chunk_id) REFERENCES vectormill.chunks ON DELETE CASCADE
    """,
)


def upgrade() -> None:
    """Make each table the first partition of a new one, without rewriting it. Claims and commits wait for a moment."""
    end = op.get_bind().execute(FIND_END).scalar_one()
    with op.get_context().autocommit_block():
        for table in TABLES:
            for statement in CHECK:
                op.execute(statement.format(table=table, end=end))
    op.execute(f"LOCK TABLE vectormill.chunks, {', '.join(f'vectormill.{table}' for table in TABLES)}")
    for table in TABLES:
        for statement in ATTACH:
            op.execute(statement.format(table=table, end=end))
    for function, table in FUNCTIONS.items():
        op.execute(FIND_CONTENT.format(function=function, table=table))
    for statement in NOTES:
        op.execute(statement)


def downgrade() -> None:
    """Copy all rows back into one table each. Stop all processes first: this takes as long as writing them did."""
    op.execute("DROP FUNCTION vectormill.note_removed_chunks() CASCADE")
    op.execute("DROP TABLE vectormill.removed_chunks")
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION vectormill.{function}(bigint)")
    for table in TABLES:
        for statement in RESTORE:
            op.execute(statement.format(table=table))
