"""Keep a followed table writable after its key column was renamed or dropped.

The trigger named the column and failed, and with it every write of the user's table. Now it warns, and notes a change of
the whole table. It looks the column up instead of catching the error: a block that catches is a subtransaction of every statement.
"""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

# See 0015 for what the rest of it does.
NOTE_CHANGES = """
    CREATE OR REPLACE FUNCTION vectormill.note_changes() RETURNS trigger LANGUAGE plpgsql
        SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        collection bigint := TG_ARGV[0];
        changed text;
        is_known boolean;
    BEGIN
        is_known := EXISTS (SELECT FROM pg_attribute
                             WHERE attrelid = TG_RELID AND attname = TG_ARGV[1] AND NOT attisdropped);
        IF NOT is_known THEN
            RAISE WARNING 'Vectormill follows %.% by its column %, which is gone; it notes a change of the whole table',
                TG_TABLE_SCHEMA, TG_TABLE_NAME, quote_ident(TG_ARGV[1])
                USING HINT = 'Correct the query of the collection''s source, unfollow the table and follow it again.';
        END IF;
        IF TG_OP = 'TRUNCATE' OR NOT is_known THEN
            INSERT INTO vectormill.source_changes (collection_id, key) VALUES (collection, '');
            RETURN NULL;
        END IF;
        changed := CASE TG_OP
            WHEN 'INSERT' THEN format('SELECT %1$I AS key FROM new_rows', TG_ARGV[1])
            WHEN 'DELETE' THEN format('SELECT %1$I AS key FROM old_rows', TG_ARGV[1])
            ELSE format('SELECT %1$I AS key FROM old_rows UNION SELECT %1$I FROM new_rows', TG_ARGV[1])
        END;
        EXECUTE format(
            'INSERT INTO vectormill.source_changes (collection_id, key)'
            ' SELECT $1, format(''%%s'', key) FROM (%s) AS changed WHERE length(format(''%%s'', key)) > 0', changed)
            USING collection;
        RETURN NULL;
    END $$
"""

# That of 0015, for a downgrade.
FORMER = """
    CREATE OR REPLACE FUNCTION vectormill.note_changes() RETURNS trigger LANGUAGE plpgsql
        SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        collection bigint := TG_ARGV[0];
        changed text;
    BEGIN
        IF TG_OP = 'TRUNCATE' THEN
            INSERT INTO vectormill.source_changes (collection_id, key) VALUES (collection, '');
            RETURN NULL;
        END IF;
        changed := CASE TG_OP
            WHEN 'INSERT' THEN format('SELECT %1$I AS key FROM new_rows', TG_ARGV[1])
            WHEN 'DELETE' THEN format('SELECT %1$I AS key FROM old_rows', TG_ARGV[1])
            ELSE format('SELECT %1$I AS key FROM old_rows UNION SELECT %1$I FROM new_rows', TG_ARGV[1])
        END;
        EXECUTE format(
            'INSERT INTO vectormill.source_changes (collection_id, key)'
            ' SELECT $1, format(''%%s'', key) FROM (%s) AS changed WHERE length(format(''%%s'', key)) > 0', changed)
            USING collection;
        RETURN NULL;
    END $$
"""


def upgrade() -> None:
    op.execute(NOTE_CHANGES)


def downgrade() -> None:
    op.execute(FORMER)
