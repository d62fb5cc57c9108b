"""The real servers that integration and acceptance tests run on: embedded Postgres and Valkey, started once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from typing import Final
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy import Engine, make_url

from tests.clusters import new_directory
from vectormill.db.migrations import migrate
from vectormill.db.roles import Roles, derive_url
from vectormill.db.session import make_engine
from vectormill.embedded.postgres import EmbeddedPostgres, give_roles
from vectormill.embedded.valkey import EmbeddedValkey
from vectormill.settings import Settings


@contextmanager
def running_postgres() -> Iterator[str]:
    """Start an embedded Postgres and yield its administrator's URL.

    It does not sync to disk, because no test cuts the power.
    """
    with new_directory() as home:
        server = EmbeddedPostgres(home)
        try:
            url = server.start()
            with _administering(url) as connection:
                connection.execute("ALTER SYSTEM SET fsync = off")
                connection.execute("SELECT pg_reload_conf()")
            yield url
        finally:
            server.destroy()


@contextmanager
def running_valkey() -> Iterator[str]:
    """Start an embedded Valkey and yield its URL."""
    with new_directory() as home:
        server = EmbeddedValkey(home)
        try:
            yield server.start()
        finally:
            server.stop()


@contextmanager
def empty_database(postgres_url: str) -> Iterator[str]:
    """Create an empty database and yield the administrator's URL for it; drop it at the end."""
    with _administering(postgres_url) as connection:
        name = _create_database(connection, template="template1")
    try:
        yield of_database(postgres_url, name)
    finally:
        with _administering(postgres_url) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def migrated_database(postgres_url: str) -> Iterator[str]:
    """Create an empty database at the newest revision and yield its URL for a service; drop it at the end."""
    with _administering(postgres_url) as connection:
        name = _create_database(connection, template=_migrated_template(postgres_url))
        # So that tests change settings of their database, and have extensions and schemas in it.
        connection.execute(f"ALTER DATABASE {name} OWNER TO {Roles().service}")
    try:
        yield derive_url(of_database(postgres_url, name), Roles().service)
    finally:
        with _administering(postgres_url) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def settings_of(admin_url: str) -> Settings:
    """Return settings with the URLs of the three roles in the database of this administrator's URL."""
    owner, service, reader = (derive_url(admin_url, name) for name in asdict(Roles()).values())
    return Settings(database_url=service, owner_database_url=owner, reader_database_url=reader)


# Tests need these rights in addition, because they gather statistics, empty tables, make statements fail and set ids.
# Processes that `vectormill up` starts, as in tests/acceptance and tests/blackbox, do not have them.
FOR_TESTS = """
    GRANT TRUNCATE, TRIGGER, MAINTAIN ON ALL TABLES IN SCHEMA vectormill TO vectormill_service;
    GRANT UPDATE ON ALL SEQUENCES IN SCHEMA vectormill TO vectormill_service
"""


# The key of all databases here, so that a worker of a test needs no connection to find it.
QUERY_KEY: Final = b"the key of all tests' databases."


@cache
def _migrated_template(postgres_url: str) -> str:
    """Return the name of a migrated database to copy others from, which is faster than migrating each.

    It accepts no connections, so no test changes it and no autovacuum blocks a copy.
    """
    with _administering(postgres_url) as connection:
        name = _create_database(connection, template="template1")
        url = of_database(postgres_url, name)
        with _administering(url) as database:
            give_roles(database, postgres_url)
        migrate(settings_of(url))
        with _administering(url) as database:
            database.execute(FOR_TESTS)
            database.execute("UPDATE vectormill.secrets SET value = %s WHERE name = 'queries'", [QUERY_KEY])
        closed = sql.SQL("ALTER DATABASE {} WITH IS_TEMPLATE true ALLOW_CONNECTIONS false")
        connection.execute(closed.format(sql.Identifier(name)))
    return name


def _create_database(connection: "psycopg.Connection[tuple[object, ...]]", *, template: str) -> str:
    name = f"test_{uuid4().hex[:12]}"
    # Copying files takes half the time of copying page by page through the log.
    create = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
    connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
    return name


def _administering(postgres_url: str) -> "psycopg.Connection[tuple[object, ...]]":
    plain = make_url(postgres_url).set(drivername="postgresql")
    return psycopg.connect(plain.render_as_string(hide_password=False), autocommit=True)


def of_database(postgres_url: str, name: str) -> str:
    return make_url(postgres_url).set(database=name).render_as_string(hide_password=False)


@contextmanager
def connected_engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(database_url, application_name="test")
    try:
        yield engine
    finally:
        engine.dispose()
