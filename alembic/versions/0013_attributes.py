"""What a row has beside its vector, in a table of its own: a change of metadata alone costs the vector index nothing.

Workers and APIs of the release before go on: triggers carry the metadata that they write to its new place, and give a
collection that such an API makes its second table. Its searches show no metadata of what new workers write.
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# Of every generation's table. New workers do not name the column, so nothing fires for them.
CARRY_METADATA = """
    CREATE FUNCTION vectormill.carry_metadata() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.metadata IS NULL THEN
            EXECUTE format('DELETE FROM vectormill.%I WHERE key = $1', TG_TABLE_NAME || '_attributes') USING NEW.key;
        ELSE
            EXECUTE format(
                'INSERT INTO vectormill.%I (key, content_hash, metadata, job_seq) VALUES ($1, $2, $3, $4)'
                ' ON CONFLICT (key) DO UPDATE SET content_hash = excluded.content_hash, metadata = excluded.metadata, metadata_hash = NULL, text = NULL, job_seq = excluded.job_seq',
                TG_TABLE_NAME || '_attributes') USING NEW.key, NEW.content_hash, NEW.metadata, NEW.job_seq;
        END IF;
        RETURN NULL;
    END $$
"""

CARRY_METADATA_OF = """
    CREATE FUNCTION vectormill.carry_metadata_of(id bigint) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        EXECUTE format(
            'CREATE TRIGGER carry_inserted_metadata AFTER INSERT ON vectormill.%I'
            ' FOR EACH ROW WHEN (NEW.metadata IS NOT NULL) EXECUTE FUNCTION vectormill.carry_metadata()',
            'generation_' || id);
        EXECUTE format(
            'CREATE TRIGGER carry_updated_metadata AFTER UPDATE OF metadata ON vectormill.%I'
            ' FOR EACH ROW EXECUTE FUNCTION vectormill.carry_metadata()',
            'generation_' || id);
    END $$
"""

# A generation without attributes: of before, or made by an API of the release before. A drop of the view would lose its
# grants; one more column at its end does not.
GIVE_ATTRIBUTES = """
    CREATE FUNCTION vectormill.give_attributes(id bigint) RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
        vectors text := 'generation_' || id;
        attributes text := vectors || '_attributes';
        collection text;
    BEGIN
        IF to_regclass('vectormill.' || vectors) IS NULL OR to_regclass('vectormill.' || attributes) IS NOT NULL THEN
            RETURN;
        END IF;
        EXECUTE format(
            'CREATE TABLE vectormill.%I ('
            ' key text PRIMARY KEY, content_hash bytea, metadata jsonb, metadata_hash bytea, text text,'
            ' search tsvector GENERATED ALWAYS AS (to_tsvector(''pg_catalog.simple''::regconfig, text)) STORED,'
            ' document text GENERATED ALWAYS AS (metadata -> ''_passage'' ->> ''document'') STORED,'
            ' job_seq bigint NOT NULL'
            ') WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05)',
            attributes);
        EXECUTE format('CREATE INDEX %I ON vectormill.%I (document) WHERE document IS NOT NULL',
                       attributes || '_document', attributes);
        EXECUTE format('INSERT INTO vectormill.%I (key, content_hash, metadata, job_seq)'
                       ' SELECT key, content_hash, metadata, job_seq FROM vectormill.%I WHERE metadata IS NOT NULL',
                       attributes, vectors);
        PERFORM vectormill.carry_metadata_of(id);
        SELECT collections.name INTO collection FROM vectormill.collections
          JOIN vectormill.generations ON generations.collection_id = collections.id
         WHERE generations.id = give_attributes.id AND generations.state = 'live';
        IF collection IS NOT NULL THEN
            EXECUTE format(
                'CREATE OR REPLACE VIEW public.%I AS'
                ' SELECT live.key, live.embedding, attributes.metadata, live.content_hash, live.job_seq, attributes.text'
                '   FROM vectormill.%I AS live LEFT JOIN vectormill.%I AS attributes ON attributes.key = live.key',
                collection, vectors, attributes);
        END IF;
    END $$
"""

GIVE_ATTRIBUTES_LATE = """
    CREATE FUNCTION vectormill.give_attributes_late() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM vectormill.give_attributes(NEW.id);
        RETURN NULL;
    END $$
"""

# At COMMIT, when the table of the generation is there.
MAKE_UP_FOR_FORMER_API = """
    CREATE CONSTRAINT TRIGGER give_attributes AFTER INSERT ON vectormill.generations
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION vectormill.give_attributes_late()
"""

TAKE_ATTRIBUTES = """
    DO $$
    DECLARE
        generation record;
    BEGIN
        FOR generation IN
            SELECT generations.id, generations.state, collections.name FROM vectormill.generations
              JOIN vectormill.collections ON collections.id = generations.collection_id
        LOOP
            CONTINUE WHEN to_regclass('vectormill.generation_' || generation.id || '_attributes') IS NULL;
            EXECUTE format('DROP TRIGGER carry_inserted_metadata ON vectormill.%I', 'generation_' || generation.id);
            EXECUTE format('DROP TRIGGER carry_updated_metadata ON vectormill.%I', 'generation_' || generation.id);
            EXECUTE format('UPDATE vectormill.%I AS live SET metadata = attributes.metadata'
                           '  FROM vectormill.%I AS attributes WHERE attributes.key = live.key',
                           'generation_' || generation.id, 'generation_' || generation.id || '_attributes');
            IF generation.state = 'live' THEN
                EXECUTE format('DROP VIEW public.%I', generation.name);
                EXECUTE format('CREATE VIEW public.%I AS'
                               ' SELECT key, embedding, metadata, content_hash, job_seq FROM vectormill.%I',
                               generation.name, 'generation_' || generation.id);
            END IF;
            EXECUTE format('DROP TABLE vectormill.%I', 'generation_' || generation.id || '_attributes');
        END LOOP;
    END $$
"""


def upgrade() -> None:
    for statement in (CARRY_METADATA, CARRY_METADATA_OF, GIVE_ATTRIBUTES, GIVE_ATTRIBUTES_LATE):
        op.execute(statement)
    op.execute("SELECT vectormill.give_attributes(id) FROM vectormill.generations")
    op.execute(MAKE_UP_FOR_FORMER_API)


def downgrade() -> None:
    op.execute("DROP TRIGGER give_attributes ON vectormill.generations")
    op.execute(TAKE_ATTRIBUTES)
    for function in ("give_attributes_late()", "give_attributes(bigint)", "carry_metadata_of(bigint)"):
        op.execute(f"DROP FUNCTION vectormill.{function}")
    op.execute("DROP FUNCTION vectormill.carry_metadata()")
