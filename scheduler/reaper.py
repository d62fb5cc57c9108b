"""Returns to the queue what a dead worker or a lost message left behind."""

import logging

from sqlalchemy import Engine

from vectormill.db.rescue import (
    end_cancelled_jobs,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)

logger = logging.getLogger(__name__)


def reap(engine: Engine, queued_timeout_seconds: float) -> int:
    """One round; the number of chunks that go back to `pending`. Each repair is a short transaction of its own."""
    with engine.begin() as connection:
        expired = rescue_expired_chunks(connection)
    with engine.begin() as connection:
        unclaimed = rescue_unclaimed_chunks(connection, queued_timeout_seconds)
    with engine.begin() as connection:
        recall_paused_chunks(connection)
    with engine.begin() as connection:
        end_cancelled_jobs(connection)
    if expired:
        logger.warning(
            "%d chunks had an expired lease: their worker died or was cut off. They run again.", expired
        )
    if unclaimed:
        logger.warning("%d dispatched chunks were not claimed in time; they are dispatched again.", unclaimed)
    return expired + unclaimed
