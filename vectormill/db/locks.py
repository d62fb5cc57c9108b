"""Locks that are never waited for long, and the lock that elects a scheduler.

Whoever needs a collection, a table or a view for itself waits a moment, gives way, and tries again.

A lock that is waited for holds up all who come later, searches and users' queries too: so never for long.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from vectormill.domain.errors import LocksHeld

T = TypeVar("T")

LOCK_MILLISECONDS: Final = 300
# Between two tries, so that those who waited come first.
PAUSE_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 60.0

LIMIT_LOCK_WAIT = text("SELECT set_config('lock_timeout', :timeout, true)")


def limit_lock_wait(connection: Connection, milliseconds: int) -> None:
    """Let no statement wait longer for a lock, until the transaction ends."""
    connection.execute(LIMIT_LOCK_WAIT, {"timeout": f"{milliseconds}ms"})


LIMIT_TIME = text("SELECT set_config('statement_timeout', :timeout, true)")


def limit_time(connection: Connection, seconds: float) -> None:
    """Let no statement take longer, until the transaction ends."""
    connection.execute(LIMIT_TIME, {"timeout": f"{math.ceil(seconds * 1000)}ms"})


def act_in_short_locks(
    engine: Engine,
    act: Callable[[Connection], T],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Return the result of `act`, done in one transaction in which no lock is waited for longer than
    LOCK_MILLISECONDS.

    `wait` is called between two tries and may raise. Raise LocksHeld when there was no way through for so long.
    """
    until = clock() + patience_seconds
    while True:
        try:
            with engine.begin() as connection:
                limit_lock_wait(connection, LOCK_MILLISECONDS)
                return act(connection)
        except (DBAPIError, psycopg.Error) as error:
            if not _is_locked(error):
                raise
            if clock() >= until:
                raise LocksHeld from error
        wait(PAUSE_SECONDS)


def _is_locked(error: DBAPIError | psycopg.Error) -> bool:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected)


# Any number that only Vectormill's scheduler uses.
ELECTION_LOCK: Final = 0x766D73636865

TAKE_ELECTION_LOCK: Final = "SELECT pg_try_advisory_lock(%s)"


def win_election(driver: psycopg.Connection[Any]) -> bool:
    """Try to take the lock that one session has at a time, and return whether this one has it until it ends."""
    row = driver.execute(TAKE_ELECTION_LOCK, (ELECTION_LOCK,)).fetchone()
    return row is not None and bool(row[0])
