"""BatchKeeper: brings request batches on: lines into jobs, ended jobs into files, and ends those whose time is over.

A few at a time, each in a thread of its own; any number of indexers may do it, by lease and fence.
"""

import logging
import threading
from types import TracebackType
from typing import Final, Self

from sqlalchemy import Engine

from indexer.requests.finalizing import finalize
from indexer.requests.held_batch import HeldBatch, Stopping
from indexer.requests.validation import validate
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.db.requests.batch_claims import (
    BatchClaim,
    claim_batch,
    expire_next,
    fail_batch,
    hand_back_batch,
)
from vectormill.db.session import make_engine
from vectormill.domain.errors import LeaseLost, VectormillError
from vectormill.domain.requests.request_batch import VALIDATING, BatchFault
from vectormill.models.registry import Registry
from vectormill.settings import Settings

logger = logging.getLogger(__name__)

# A small batch must not hold its client up, nor wait behind a large one.
BATCHES_AT_ONCE: Final = 2
_PAUSE_SECONDS: Final = 0.5
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0


class BatchKeeper:
    """Works on threads and connections of its own from the beginning of the block to its end."""

    def __init__(self, database_url: str, settings: Settings, registry: Registry, owner: str) -> None:
        # One for each: what is read is read before something is written.
        self._engine = make_engine(
            database_url, application_name="vectormill batches", pool_size=BATCHES_AT_ONCE, max_overflow=0
        )
        self._settings = settings
        self._registry = registry
        self._owner = owner
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"batches-{number}") for number in range(BATCHES_AT_ONCE)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._engine.dispose()

    def _run(self) -> None:
        while not self._stopping.is_set():
            has_more = False
            try:
                has_more = keep_next(
                    self._engine, self._settings, self._registry, self._owner, self._stopping
                )
            except DATABASE_ERRORS as error:
                logger.warning("Request batches wait, trying again: %s", error)
            except Exception:
                logger.exception("Request batches wait, trying again.")
            if not has_more:
                self._stopping.wait(_PAUSE_SECONDS)


def keep_next(
    engine: Engine, settings: Settings, registry: Registry, owner: str, stopping: threading.Event
) -> bool:
    """Does the next step of some batch; False when there is nothing to do for any."""
    with engine.begin() as connection:
        has_expired = expire_next(connection)
    with engine.begin() as connection:
        claim = claim_batch(connection, owner, settings.lease_seconds)
    if claim is None:
        return has_expired
    if claim.batch.attempt > settings.max_attempts:
        give_up(engine, claim)
    else:
        bring_on(HeldBatch(claim, engine, settings, registry, stopping.is_set))
    return True


def bring_on(held: HeldBatch) -> None:
    """One step of a claimed batch. Raises an error of the database that could not be told of: the lease ends then."""
    batch = held.claim.batch
    logger.info("Batch %s is %s.", batch.name, batch.state)
    try:
        if batch.state == VALIDATING:
            validate(held)
        else:
            finalize(held)
    except LeaseLost:
        logger.warning("Batch %s was cancelled, or lost to another indexer.", batch.name)
    except Stopping:
        with held.engine.begin() as connection:
            hand_back_batch(connection, held.claim)
    except (VectormillError, *DATABASE_ERRORS) as error:
        _hand_back_failed(held, error)
    except Exception as error:  # noqa: BLE001 - whatever it was, the batch is tried again, and ends by its attempts
        _hand_back_failed(held, error)


def _hand_back_failed(held: HeldBatch, error: Exception) -> None:
    batch = held.claim.batch
    pause = min(_FIRST_PAUSE_SECONDS * 2**batch.attempt, _LONGEST_PAUSE_SECONDS)
    logger.error("Batch %s met an error; it is tried again in %g s.", batch.name, pause, exc_info=error)
    with held.engine.begin() as connection:
        hand_back_batch(connection, held.claim, pause_seconds=pause, is_counted=True)


def give_up(engine: Engine, claim: BatchClaim) -> None:
    """Fails a batch that was claimed so often and did not come through."""
    batch = claim.batch
    fault = BatchFault(
        "not_processed",
        f"The batch was tried {batch.attempt - 1} times while it was {batch.state} and did not come through "
        "(VECTORMILL_MAX_ATTEMPTS); the indexer's log says why.",
    )
    with engine.begin() as connection:
        fail_batch(connection, claim, [fault], batch.num_lines)
