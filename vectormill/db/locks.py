"""Transactions with a short lock time-out, and the lock that elects a scheduler.

A lock request that waits blocks all later ones, including those of searches and of users' queries. So a
transaction that needs an exclusive lock on a collection, table or view waits only a moment, rolls back, and
tries again.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, Row, TextClause, text
from sqlalchemy.exc import DBAPIError

from vectormill.domain.errors import LocksHeld

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_MILLISECONDS: Final = 300
# The pause between two tries, so that transactions that have waited come first.
PAUSE_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 60.0

LIMIT_LOCK_WAIT = text("SELECT set_config('lock_timeout', :timeout, true)")


def limit_lock_wait(connection: Connection, milliseconds: int) -> None:
    """Limit the time that a statement may wait for a lock, until the transaction ends."""
    connection.execute(LIMIT_LOCK_WAIT, {"timeout": f"{milliseconds}ms"})


LIMIT_TIME = text("SELECT set_config('statement_timeout', :timeout, true)")


def limit_time(connection: Connection, seconds: float) -> None:
    """Limit the time that a statement may take, until the transaction ends."""
    connection.execute(LIMIT_TIME, {"timeout": f"{math.ceil(seconds * 1000)}ms"})


def find_row_within(
    connection: Connection, seconds: float, statement: TextClause, values: Mapping[str, Any] | None = None
) -> Row[Any] | None:
    """Return the row of a statement; None if it takes longer, which aborts the caller's transaction."""
    limit_time(connection, seconds)
    try:
        return connection.execute(statement, values).one()
    except DBAPIError as error:
        if not isinstance(error.orig, psycopg.errors.QueryCanceled):
            raise
        return None


def act_in_short_locks(
    engine: Engine,
    act: Callable[[Connection], T],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Run `act` in a transaction with a short lock time-out, and retry until it succeeds.

    Return the result of `act`. The time-out is LOCK_MILLISECONDS. `wait` is called between two tries and may
    raise. Raise LocksHeld if no try has succeeded after `patience_seconds`.
    """
    until = clock() + patience_seconds
    while True:
        try:
            with engine.begin() as connection:
                limit_lock_wait(connection, LOCK_MILLISECONDS)
                return act(connection)
        except (DBAPIError, psycopg.Error) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            if not isinstance(cause, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected):
                raise
            if clock() >= until:
                raise LocksHeld from error
        wait(PAUSE_SECONDS)


def drop_if_unused(engine: Engine, drop: Callable[[Connection], int], what: str) -> int:
    """Return what `drop` returns in its transaction, or 0 if somebody uses `what` it drops, or depends on it."""
    try:
        return act_in_short_locks(engine, drop, patience_seconds=0)
    except (LocksHeld, DBAPIError) as error:
        logger.info("%s cannot be dropped yet: %s", what, error)
        return 0


def drop_tables(engine: Engine, listed: TextClause) -> int:
    """Drop the tables of the schema vectormill that a statement lists, and return their number.

    Each goes in its own transaction; one that is in use is left for the next call.
    """
    with engine.connect() as connection:
        tables = [f"vectormill.{name}" for name in connection.execute(listed).scalars()]

    def drop(connection: Connection, table: str) -> int:
        connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
        return 1

    return sum(drop_if_unused(engine, partial(drop, table=table), table) for table in tables)


# An arbitrary number that only Vectormill's scheduler uses.
ELECTION_LOCK: Final = 0x766D73636865

TAKE_ELECTION_LOCK: Final = "SELECT pg_try_advisory_lock(%s)"


def win_election(driver: psycopg.Connection[Any]) -> bool:
    """Try to take the election lock without waiting, and return whether this session has it.

    Only one session can hold the lock, until that session ends.
    """
    row = driver.execute(TAKE_ELECTION_LOCK, (ELECTION_LOCK,)).fetchone()
    return row is not None and bool(row[0])
