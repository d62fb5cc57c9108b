"""What notes the changes of a user's own table, and a queue of them that a collection's deletion cannot hold up.

A foreign key would lock the collection's row in each of the user's transactions, and fail the last ones of a collection
that is being deleted. What is noted of a collection that is gone, the follower removes.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# Runs as its owner, for whoever writes the user's table needs no right in our schema. The names of the arguments come
# from the trigger, which only its owner could make; nothing that the user defines is called: format() asks a type's
# output function, which is C, and no cast. An empty key, which no item has, stands for the whole table; a row without
# one is none.
NOTE_CHANGES = """
    CREATE FUNCTION vectormill.note_changes() RETURNS trigger LANGUAGE plpgsql
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
    op.execute("ALTER TABLE vectormill.source_changes DROP CONSTRAINT fk_source_changes_collection_id")
    op.execute(NOTE_CHANGES)
    op.execute("REVOKE ALL ON FUNCTION vectormill.note_changes() FROM PUBLIC")


def downgrade() -> None:
    # With the triggers that call it, on tables of users.
    op.execute("DROP FUNCTION vectormill.note_changes() CASCADE")
    op.execute(
        "DELETE FROM vectormill.source_changes WHERE collection_id NOT IN (SELECT id FROM vectormill.collections)"
    )
    op.execute("""
        ALTER TABLE vectormill.source_changes
            ADD CONSTRAINT fk_source_changes_collection_id
            FOREIGN KEY (collection_id) REFERENCES vectormill.collections (id) ON DELETE CASCADE
    """)
