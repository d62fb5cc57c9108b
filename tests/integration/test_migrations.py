"""Models and migrations agree, and migrating is safe to repeat and to run twice at once."""

import subprocess
import sys

from sqlalchemy import Engine, text

from tests.services import connected_engine
from vectormill.db.migrations import find_missing_revision
from vectormill.db.tables import SCHEMA, metadata

# Everything Postgres knows of our tables: columns with types and defaults, constraints and indexes with definitions.
DESCRIBE_SCHEMA = text("""
    SELECT 'column' AS kind, table_name || '.' || column_name AS name,
           concat_ws(' ', data_type, udt_name, is_nullable, column_default, is_identity) AS definition
      FROM information_schema.columns WHERE table_schema = :schema AND table_name <> 'alembic_version'
     UNION ALL
    SELECT 'constraint', conrelid::regclass::text || '.' || conname, pg_get_constraintdef(oid)
      FROM pg_constraint WHERE connamespace = CAST(:schema AS regnamespace)
                           AND conrelid::regclass::text NOT LIKE '%alembic_version'
     UNION ALL
    SELECT 'index', tablename || '.' || indexname, indexdef
      FROM pg_indexes WHERE schemaname = :schema AND tablename <> 'alembic_version'
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


def test_a_migrated_database_misses_nothing_and_an_empty_one_does(engine: Engine) -> None:
    assert find_missing_revision(engine) is None
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM vectormill.alembic_version"))
    assert find_missing_revision(engine) == "0003"


def test_processes_that_migrate_at_once_do_not_disturb_each_other(database_url: str) -> None:
    with connected_engine(database_url) as engine, engine.begin() as connection:
        connection.execute(text("DROP SCHEMA vectormill CASCADE"))
    migrate = "import sys; from vectormill.db.migrations import upgrade; upgrade(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", migrate, database_url]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    with connected_engine(database_url) as engine:
        assert find_missing_revision(engine) is None
