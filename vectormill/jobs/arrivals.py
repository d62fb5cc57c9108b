"""Arrivals: what wakes the dispatcher when a job is submitted, resumed or retried."""

from typing import Any, Final

import psycopg

from vectormill.jobs.job import TENDED_JOB_STATES

LISTEN_FOR_JOBS: Final = "LISTEN vectormill_jobs"

HAS_OPEN_JOBS: Final = f"""
    SELECT EXISTS (SELECT 1 FROM vectormill.jobs WHERE state IN {TENDED_JOB_STATES})
"""


def has_open_jobs(driver: psycopg.Connection[Any]) -> bool:
    """Return whether any job may have chunks to dispatch, recall or end."""
    row = driver.execute(HAS_OPEN_JOBS).fetchone()
    return row is not None and bool(row[0])


def listen_for_jobs(driver: psycopg.Connection[Any]) -> None:
    """Have this connection collect the notifications that has_heard_of_job reads."""
    driver.execute(LISTEN_FOR_JOBS)


def has_heard_of_job(driver: psycopg.Connection[Any]) -> bool:
    """Return whether a job has arrived since the last call. Does not wait."""
    return bool(list(driver.notifies(timeout=0)))
