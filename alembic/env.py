"""Run migrations against the database whose URL vectormill.db.migrations passes in."""

import time

from alembic import context
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from vectormill.db.migrations import SCHEMA, find_known_revision
from vectormill.db.session import make_engine
from vectormill.domain.errors import ConfigurationError

# An arbitrary number that only Vectormill's migrations use.
ADVISORY_LOCK = 0x766D696C6C
TURN_SECONDS = 0.2


def enable_pgvector(connection: Connection) -> None:
    """Create the pgvector extension in the schema public, where every role finds it.

    Without a schema it would go to the first one of the search path, which for a role named like our schema
    is ours. Raise ConfigurationError when the extension cannot be created.
    """
    try:
        connection.execute(text("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public"))
    except DBAPIError as error:
        cause = str(error.orig).strip().splitlines()[0]
        raise ConfigurationError(
            f"pgvector cannot be enabled in the database: {cause}. Install pgvector 0.8.4 or newer on the server, or "
            "have the database's owner run CREATE EXTENSION vector SCHEMA public."
        ) from error


def take_turn(connection: Connection) -> None:
    """Wait until no other migration runs, polling outside of transactions.

    An index that another migration builds concurrently waits for every open transaction, so an open one would
    deadlock.
    """
    while not connection.execute(
        text("SELECT pg_try_advisory_lock(:lock)"), {"lock": ADVISORY_LOCK}
    ).scalar_one():
        connection.commit()
        time.sleep(TURN_SECONDS)  # a wait inside a statement would hold up a concurrent index build


def migrate(connection: Connection) -> None:
    """Apply each migration in a transaction of its own, one process at a time.

    A migration that fails leaves those before it in place. Raise ConfigurationError for a database of an
    unknown revision.
    """
    connection.execute(text("SET lock_timeout = '60s'"))
    take_turn(connection)
    find_known_revision(connection, ScriptDirectory.from_config(context.config))
    enable_pgvector(connection)
    connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    connection.commit()
    context.configure(connection=connection, version_table_schema=SCHEMA, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()
    connection.commit()


engine = make_engine(context.config.attributes["database_url"], application_name="vectormill migrate")
try:
    with engine.connect() as connection:
        migrate(connection)
finally:
    engine.dispose()
