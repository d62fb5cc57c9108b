"""Removes what is past its time: ended jobs beyond their retention, uploads whose client is gone, dead workers."""

import logging

from sqlalchemy import Engine

from vectormill.db.rescue import delete_stale_uploads, prune

logger = logging.getLogger(__name__)


def prune_expired(engine: Engine, retention_seconds: float, upload_timeout_seconds: float) -> None:
    """One round: at most a hundred jobs, so that a backlog never becomes one long transaction."""
    with engine.begin() as connection:
        uploads = delete_stale_uploads(connection, upload_timeout_seconds)
    with engine.begin() as connection:
        pruned = prune(connection, retention_seconds)
    if uploads:
        logger.info("Removed %d uploads whose client went silent.", len(uploads))
    if pruned.jobs:
        logger.info("Removed %d ended jobs past their retention.", pruned.jobs)
