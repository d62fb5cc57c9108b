"""Connections to Postgres: the pools of every process, the secrets that they share, and the plans of statements."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url

# These limits keep a forgotten transaction from holding back vacuum, and a lock from blocking a worker for
# ever.
SESSION_OPTIONS = "-c idle_in_transaction_session_timeout=60000 -c lock_timeout=20000 -c TimeZone=UTC"


def make_engine(
    url: str, *, application_name: str, pool_size: int = 5, max_overflow: int | None = None
) -> Engine:
    """Return an engine whose connections notice a dead server within half a minute.

    `pool_size` connections are kept, and `max_overflow` more (`pool_size` by default) are opened when needed.
    The pool raises an error after `pool_timeout` instead of waiting for ever, and tests each connection
    before use, so that a restarted Postgres costs one reconnect and no error. A URL without a driver means
    psycopg 3. A URL that ends in `?pgbouncer=true` leads to a pooler: no statement is prepared, and time-outs
    are those of the role.
    """
    target = make_url(url)
    if target.drivername in ("postgres", "postgresql"):
        target = target.set(drivername="postgresql+psycopg")
    is_pooled = target.query.get("pgbouncer") == "true"
    target = target.difference_update_query(["pgbouncer"])
    return create_engine(
        target,
        pool_size=pool_size,
        max_overflow=pool_size if max_overflow is None else max_overflow,
        pool_timeout=30,
        pool_pre_ping=True,
        # Otherwise every logged error would quote what clients sent: keys, metadata, texts of queries.
        hide_parameters=True,
        connect_args={
            "application_name": application_name,
            "client_encoding": "utf8",  # binary arrays of text contain UTF-8
            "connect_timeout": 10,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
            **({"prepare_threshold": None} if is_pooled else {"options": SESSION_OPTIONS}),
        },
    )


def driver_of(connection: Connection) -> psycopg.Connection[Any]:
    """Return psycopg's connection, which sends binary parameters and COPY."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


def walk_plan(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the plan node and all nodes below it."""
    yield node
    for below in node.get("Plans", ()):
        yield from walk_plan(below)


LOAD_SECRET = text("""
    SELECT value, extract(epoch FROM required_from - now())::float8 AS seconds
      FROM vectormill.secrets WHERE name = :name
""")


def load_secret(engine: Engine, name: str) -> tuple[bytes, float]:
    """Return a secret, and the time on the monotonic clock from which it is required. Raise SQLAlchemyError."""
    with engine.connect() as connection:
        row = connection.execute(LOAD_SECRET, {"name": name}).one()
    return bytes(row.value), time.monotonic() + row.seconds
