"""Leader election among schedulers: a session lock, which another gets when the connection of the one ends."""

from typing import Any, Final

import psycopg

# Any number that only Vectormill's scheduler uses.
ELECTION_LOCK: Final = 0x766D73636865

TAKE_ELECTION_LOCK: Final = "SELECT pg_try_advisory_lock(%s)"


def win_election(driver: psycopg.Connection[Any]) -> bool:
    """Try to take the lock that one session has at a time, and return whether this one has it until it ends."""
    row = driver.execute(TAKE_ELECTION_LOCK, (ELECTION_LOCK,)).fetchone()
    return row is not None and bool(row[0])
