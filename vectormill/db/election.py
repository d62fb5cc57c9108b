"""Which scheduler works, and what wakes it: on a connection that it keeps, and whose end gives the lock to another."""

from typing import Any, Final

import psycopg

from vectormill.jobs.job import TENDED_JOB_STATES

# Any number that only Vectormill's scheduler uses.
ELECTION_LOCK: Final = 0x766D73636865

TAKE_ELECTION_LOCK: Final = "SELECT pg_try_advisory_lock(%s)"

# A submission, a resumption and a retry notify it.
LISTEN_FOR_JOBS: Final = "LISTEN vectormill_jobs"

HAS_OPEN_JOBS: Final = f"""
    SELECT EXISTS (SELECT 1 FROM vectormill.jobs WHERE state IN {TENDED_JOB_STATES})
"""


def win_election(driver: psycopg.Connection[Any]) -> bool:
    """Whether this session has the lock that only one has; once won it is held until the session ends."""
    return _is_true(driver.execute(TAKE_ELECTION_LOCK, (ELECTION_LOCK,)))


def has_open_jobs(driver: psycopg.Connection[Any]) -> bool:
    """Whether there is a job that a dispatcher may have to do with."""
    return _is_true(driver.execute(HAS_OPEN_JOBS))


def listen_for_jobs(driver: psycopg.Connection[Any]) -> None:
    """From here on has_heard_of_job hears of what is submitted."""
    driver.execute(LISTEN_FOR_JOBS)


def has_heard_of_job(driver: psycopg.Connection[Any]) -> bool:
    """Whether a job has come since this was asked last. Waits for nothing."""
    return bool(list(driver.notifies(timeout=0)))


def _is_true(cursor: psycopg.Cursor[Any]) -> bool:
    row = cursor.fetchone()
    return row is not None and bool(row[0])
