"""The real servers that integration and acceptance tests run on: embedded Postgres and Valkey, started once."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy import Engine, make_url

from tests.clusters import new_directory
from vectormill.db.migrations import upgrade
from vectormill.db.session import make_engine
from vectormill.embedded.postgres import EmbeddedPostgres
from vectormill.embedded.valkey import EmbeddedValkey


@contextmanager
def running_postgres() -> Iterator[str]:
    """A Postgres of our own; its URL."""
    with new_directory() as home:
        server = EmbeddedPostgres(home)
        try:
            yield server.start()
        finally:
            server.destroy()


@contextmanager
def running_valkey() -> Iterator[str]:
    """A Valkey of our own; its URL."""
    with new_directory() as home:
        server = EmbeddedValkey(home)
        try:
            yield server.start()
        finally:
            server.stop()


@contextmanager
def migrated_database(postgres_url: str) -> Iterator[str]:
    """A new, empty database brought to the newest revision; dropped at the end."""
    name = f"test_{uuid4().hex[:12]}"
    url = make_url(postgres_url)
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    own = url.set(database=name)
    own_text = own.render_as_string(hide_password=False)
    upgrade(own_text)
    try:
        yield own_text
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def connected_engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(database_url, application_name="test")
    try:
        yield engine
    finally:
        engine.dispose()
