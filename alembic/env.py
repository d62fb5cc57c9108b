"""Runs migrations against the database that vectormill.db.migrations names."""

import time

from alembic import context
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from vectormill.db.migrations import find_known_revision
from vectormill.db.session import make_engine
from vectormill.domain.errors import ConfigurationError
from vectormill.tables import SCHEMA, metadata

# Any number that only Vectormill's migrations use.
ADVISORY_LOCK = 0x766D696C6C
TURN_SECONDS = 0.2


def enable_pgvector(connection: Connection) -> None:
    """In public, whatever the role is called: one called like our schema would get it there, where others miss it."""
    try:
        connection.execute(text("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public"))
    except DBAPIError as error:
        cause = str(error.orig).strip().splitlines()[0]
        raise ConfigurationError(
            f"pgvector cannot be enabled in the database: {cause}. Install pgvector 0.8.4 or newer on the server, or "
            "have the database's owner run CREATE EXTENSION vector SCHEMA public."
        ) from error


def take_turn(connection: Connection) -> None:
    """Wait until nobody else migrates, in no transaction: an index that is made concurrently waits for each of them."""
    while not connection.execute(
        text("SELECT pg_try_advisory_lock(:lock)"), {"lock": ADVISORY_LOCK}
    ).scalar_one():
        connection.commit()
        time.sleep(TURN_SECONDS)  # waiting inside a statement would hold up a concurrent index build


def migrate(connection: Connection) -> None:
    """Apply each migration in a transaction of its own; one that fails leaves those before it in place."""
    connection.execute(text("SET lock_timeout = '60s'"))
    take_turn(connection)
    find_known_revision(connection, ScriptDirectory.from_config(context.config))
    enable_pgvector(connection)
    connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table_schema=SCHEMA,
        include_schemas=True,
        include_name=lambda name, kind, _: kind != "schema" or name == SCHEMA,
        compare_server_default=True,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()
    connection.commit()


engine = make_engine(context.config.attributes["database_url"], application_name="vectormill migrate")
try:
    with engine.connect() as connection:
        migrate(connection)
finally:
    engine.dispose()
