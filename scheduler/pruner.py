"""Removes what is past its time: ended jobs beyond their retention, abandoned uploads and searches, dead workers."""

import logging
import time
from collections.abc import Callable

from sqlalchemy import Engine

from vectormill.db.rescue import (
    delete_dead_workers,
    delete_expired_job,
    delete_forgotten_queries,
    delete_stale_uploads,
)

logger = logging.getLogger(__name__)

# The dispatcher waits meanwhile, and searches with it. A thousand chunks take a tenth of a second or so.
ROUND_SECONDS = 1.0


def prune_expired(
    engine: Engine,
    retention_seconds: float,
    upload_timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """One round; the number of jobs removed. One job a transaction, and none is begun after ROUND_SECONDS."""
    with engine.begin() as connection:
        uploads = delete_stale_uploads(connection, upload_timeout_seconds)
        delete_dead_workers(connection)
        delete_forgotten_queries(connection)
    end, num_jobs = clock() + ROUND_SECONDS, 0
    while clock() < end:
        with engine.begin() as connection:
            if delete_expired_job(connection, retention_seconds) is None:
                break
        num_jobs += 1
    if uploads:
        logger.info("Removed %d uploads whose client went silent.", len(uploads))
    if num_jobs:
        logger.info("Removed %d ended jobs past their retention.", num_jobs)
    return num_jobs
