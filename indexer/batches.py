"""Request batches in the indexer: make jobs of their lines, make files of ended jobs, expire overdue ones.

A few batches are processed at a time, each in a thread. Leases and fences allow any number of indexers.
"""

import logging
import threading
from typing import Final

from sqlalchemy import Engine

from vectormill.batches.batches import HeldBatch, claim_batch, expire_next, fail_batch
from vectormill.batches.finalizing import finalize
from vectormill.batches.request_batch import VALIDATING, BatchFault
from vectormill.batches.validation import validate
from vectormill.db.session import make_engine
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.work.loop import Loop, handing_back

logger = logging.getLogger(__name__)

# At least two, so that a small batch does not wait behind a large one.
BATCHES_AT_ONCE: Final = 2
_PAUSE_SECONDS: Final = 0.5


class BatchKeeper(Loop):
    """Carry out request batches in threads, with separate connections, while the `with` block runs."""

    def __init__(self, database_url: str, settings: Settings, registry: Registry, owner: str) -> None:
        super().__init__("request batches", pause_seconds=_PAUSE_SECONDS, num_threads=BATCHES_AT_ONCE)
        # Each thread needs one connection, because it reads and writes in turn.
        self._engine = make_engine(
            database_url, application_name="vectormill batches", pool_size=BATCHES_AT_ONCE, max_overflow=0
        )
        self._settings = settings
        self._registry = registry
        self._owner = owner

    def step(self) -> bool:
        return keep_next(self._engine, self._settings, self._registry, self._owner, self.stopping)

    def close(self) -> None:
        self._engine.dispose()


def keep_next(
    engine: Engine, settings: Settings, registry: Registry, owner: str, stopping: threading.Event
) -> bool:
    """Carry out the next step of any request batch; return False if there is none."""
    with engine.begin() as connection:
        has_expired = expire_next(connection)
    with engine.begin() as connection:
        claimed = claim_batch(connection, owner, settings.lease_seconds)
    if claimed is None:
        return has_expired
    lease, batch = claimed
    process_batch(
        HeldBatch(
            engine=engine,
            lease=lease,
            is_stopping=stopping.is_set,
            batch=batch,
            settings=settings,
            registry=registry,
        )
    )
    return True


def process_batch(held: HeldBatch) -> None:
    """Carry out one step of a claimed request batch, or fail it after too many attempts.

    Raise a database error only if it could not be recorded.
    """
    logger.info("Batch %s is %s.", held.batch.name, held.batch.state)
    with handing_back(held.engine, held.lease):
        if held.lease.attempt > held.settings.max_attempts:
            give_up(held)
        elif held.batch.state == VALIDATING:
            validate(held)
        else:
            finalize(held)


def give_up(held: HeldBatch) -> None:
    """Fail a request batch that was claimed too often without being completed. Raise LeaseLost."""
    reason = f"{held.lease.describe_attempts()} VECTORMILL_MAX_ATTEMPTS is {held.settings.max_attempts}."
    with held.engine.begin() as connection:
        fail_batch(connection, held.lease, [BatchFault("not_processed", reason)], held.batch.num_lines)
