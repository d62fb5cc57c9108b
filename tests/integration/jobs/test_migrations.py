"""Models and migrations agree; migrating is safe to repeat, to run twice at once and to take back."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from tests.protocol import claim_next, complete, make_items, submit
from tests.services import connected_engine
from vectormill.db.migrations import find_missing_revision, make_config, upgrade
from vectormill.db.scripts import SCRIPTS, find_newest_revision
from vectormill.domain.errors import ConfigurationError
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job
from vectormill.jobs.partitions import list_spans
from vectormill.tables import SCHEMA, metadata

OLDEST_FIRST = [script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()][::-1]

# Everything Postgres knows of our tables: columns with types and defaults, constraints and indexes with definitions.
# Partitions are left out: they have those of their table.
DESCRIBE_SCHEMA = text("""
    SELECT * FROM (
    SELECT 'column' AS kind, table_name || '.' || column_name AS name,
           concat_ws(' ', data_type, udt_name, is_nullable, column_default, is_identity) AS definition
      FROM information_schema.columns WHERE table_schema = :schema AND table_name <> 'alembic_version'
     UNION ALL
    SELECT 'constraint', conrelid::regclass::text || '.' || conname, pg_get_constraintdef(oid)
      FROM pg_constraint WHERE connamespace = CAST(:schema AS regnamespace) AND contype <> 't'
                           AND conrelid::regclass::text NOT LIKE '%alembic_version'
     UNION ALL
    SELECT 'index', tablename || '.' || indexname, indexdef
      FROM pg_indexes WHERE schemaname = :schema AND tablename <> 'alembic_version'
     UNION ALL
    SELECT 'storage', relname, (SELECT string_agg(option, ' ' ORDER BY option) FROM unnest(reloptions) AS option)
      FROM pg_class WHERE relnamespace = CAST(:schema AS regnamespace) AND relkind IN ('r', 'p')
                      AND relname <> 'alembic_version') AS described
     WHERE NOT EXISTS (SELECT FROM pg_class WHERE relispartition AND relnamespace = CAST(:schema AS regnamespace)
                                              AND relname IN (split_part(name, '.', 1), split_part(name, '.', 2)))
     ORDER BY 1, 2
""")


def describe(engine: Engine) -> list[tuple[str, str, str]]:
    with engine.connect() as connection:
        return [
            (row.kind, row.name, row.definition)
            for row in connection.execute(DESCRIBE_SCHEMA, {"schema": SCHEMA})
        ]


def test_migrations_make_exactly_the_tables_that_the_models_describe(engine: Engine) -> None:
    migrated = describe(engine)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA vectormill CASCADE"))
        connection.execute(text("CREATE SCHEMA vectormill"))
        metadata.create_all(connection)
    assert len(migrated) > 50
    assert migrated == describe(engine)


def test_a_migration_enables_pgvector_where_every_role_finds_it(engine: Engine) -> None:
    find = text("SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'vector'")
    with engine.connect() as connection:
        assert connection.execute(find).scalar_one() == "public"


def test_a_database_in_which_pgvector_cannot_be_enabled_is_told_so(database_url: str) -> None:
    with connected_engine(database_url) as engine, engine.begin() as connection:
        connection.execute(text("DROP EXTENSION vector CASCADE; DROP SCHEMA public CASCADE"))
    with pytest.raises(ConfigurationError, match=r'schema "public" does not exist.*Install pgvector 0\.8\.4'):
        upgrade(database_url)


def test_a_migrated_database_misses_nothing_and_an_empty_one_does(engine: Engine) -> None:
    assert find_missing_revision(engine) is None
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM vectormill.alembic_version"))
    assert find_newest_revision() == OLDEST_FIRST[-1]
    assert find_missing_revision(engine) == OLDEST_FIRST[-1]


@pytest.mark.parametrize(
    ("revision", "said"),
    [("0025", "before the first release.*Create a new database"), ("9999", "a newer release")],
)
def test_a_database_that_no_migration_leads_from_is_refused_in_a_sentence(
    database_url: str, engine: Engine, revision: str, said: str
) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE vectormill.alembic_version SET version_num = :it"), {"it": revision})
    with pytest.raises(ConfigurationError, match=said):
        upgrade(database_url)
    with pytest.raises(ConfigurationError, match=said):
        find_missing_revision(engine)


def test_processes_that_migrate_at_once_do_not_disturb_each_other(database_url: str) -> None:
    with connected_engine(database_url) as engine, engine.begin() as connection:
        connection.execute(text("DROP SCHEMA vectormill CASCADE"))
    migrate = "import sys; from vectormill.db.migrations import upgrade; upgrade(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", migrate, database_url]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    with connected_engine(database_url) as engine:
        assert find_missing_revision(engine) is None


CONCURRENT_MIGRATION = """
from alembic import op
revision, down_revision = "concurrent", "{head}"
def upgrade():
    with op.get_context().autocommit_block():
        op.execute("CREATE INDEX CONCURRENTLY made_concurrently ON vectormill.jobs (model)")
def downgrade():
    pass
"""

MIGRATE_FURTHER = """
import sys
from alembic import command
from vectormill.db.migrations import make_config
from vectormill.db.scripts import SCRIPTS
config = make_config(sys.argv[1])
config.set_main_option("path_separator", "newline")
config.set_main_option("version_locations", f"{SCRIPTS}/versions\\n{sys.argv[2]}")
command.upgrade(config, "head")
"""


def test_a_migration_can_make_an_index_concurrently_while_others_wait_for_their_turn(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "concurrent.py").write_text(CONCURRENT_MIGRATION.format(head=OLDEST_FIRST[-1]))
    arguments = [sys.executable, "-c", MIGRATE_FURTHER, database_url, str(tmp_path)]
    processes = [subprocess.Popen(arguments) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    with engine.connect() as connection:
        valid = text(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = 'vectormill.made_concurrently'::regclass"
        )
        assert connection.execute(valid).scalar_one() is True


def downgrade(database_url: str, revision: str) -> None:
    command.downgrade(make_config(database_url), revision)


def encode_a_job(engine: Engine) -> Job:
    """A job whose vectors lie in the collection `docs`."""
    job = submit(engine, make_items(6), collection="docs")
    while not complete(engine, claim_next(engine)):
        pass
    return job


def test_every_migration_is_undone_by_its_downgrade(database_url: str, engine: Engine) -> None:
    newest = describe(engine)
    downgrade(database_url, "base")
    schemas = []
    for revision in OLDEST_FIRST:
        schemas.append(describe(engine))
        upgrade(database_url, revision)
    assert describe(engine) == newest
    for revision, before in zip(["base", *OLDEST_FIRST][-2::-1], reversed(schemas), strict=True):
        downgrade(database_url, revision)
        assert describe(engine) == before, revision
    assert describe(engine) == []


def test_jobs_and_vectors_survive_the_way_to_an_older_schema_and_back(
    database_url: str, engine: Engine
) -> None:
    job = encode_a_job(engine)
    with engine.connect() as connection:
        before = connection.execute(text("SELECT * FROM docs ORDER BY key")).all()
        done = find_job(connection, job.id).num_done
    for revision in OLDEST_FIRST:
        downgrade(database_url, revision)
        upgrade(database_url)
        with engine.connect() as connection:
            assert connection.execute(text("SELECT * FROM docs ORDER BY key")).all() == before
            assert find_job(connection, job.id).num_done == done == len(before) == 6


def test_tables_of_multi_vectors_can_have_codes_afterwards_and_keep_their_rows(
    database_url: str, engine: Engine
) -> None:
    downgrade(database_url, "0035")
    with engine.begin() as connection:
        for name in ("generation_7", "generation_7_fill"):
            connection.execute(
                text(f"CREATE TABLE vectormill.{name} (key text, multi_vector halfvec(2)[] NOT NULL)")
            )
            connection.execute(text(f"INSERT INTO vectormill.{name} VALUES ('a', ARRAY['[1,2]'::halfvec])"))
    upgrade(database_url)
    codes = "UPDATE vectormill.generation_7{} SET multi_vector = NULL, multi_vector_codes = {}"
    with engine.connect() as connection:
        connection.execute(text(codes.format("_fill", "'a'")))
        with pytest.raises(IntegrityError, match="check constraint"):
            connection.execute(text(codes.format("", "NULL")))
    downgrade(database_url, "0035")
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT CAST(multi_vector AS text) FROM vectormill.generation_7"))
        assert kept.scalar_one() == '{"[1,2]"}'


def test_after_the_first_migration_is_undone_a_collection_can_be_made_anew(
    database_url: str, engine: Engine
) -> None:
    encode_a_job(engine)
    downgrade(database_url, "base")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT to_regclass('docs')")).scalar_one() is None
    upgrade(database_url)
    encode_a_job(engine)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM docs")).scalar_one() == 6


FIND_FILE = text("SELECT pg_relation_filenode(CAST(:name AS regclass))")


def test_texts_become_the_first_partition_as_they_are_and_come_back_without_those_of_deleted_jobs(
    database_url: str, engine: Engine
) -> None:
    job = submit(engine, make_items(12))
    downgrade(database_url, "0030")
    with engine.begin() as connection:
        file = connection.execute(FIND_FILE, {"name": "vectormill.chunk_payloads"}).scalar_one()
        # as if an earlier try had been interrupted
        connection.execute(
            text("ALTER TABLE vectormill.chunk_payloads ADD CONSTRAINT closing CHECK (chunk_id < 9)")
        )
    upgrade(database_url)
    with engine.begin() as connection:
        (first,) = list_spans(connection)
        assert connection.execute(FIND_FILE, {"name": first.name("chunk_payloads")}).scalar_one() == file
        connection.execute(text("DELETE FROM vectormill.chunks WHERE seq = 0"))
        payloads = text("SELECT count(*) FROM vectormill.chunk_payloads")
        assert connection.execute(payloads).scalar_one() == job.num_chunks == 3
    downgrade(database_url, "0030")
    with engine.begin() as connection:
        assert connection.execute(payloads).scalar_one() == 2
        connection.execute(text("DELETE FROM vectormill.jobs"))
        assert connection.execute(payloads).scalar_one() == 0
