"""Loops: what an indexer does in threads beside its runs, with request batches and with inputs and outputs of jobs.

Leases and fences allow any number of indexers.
"""

import logging
import threading
from typing import ClassVar

from sqlalchemy import Engine

from vectormill.batches.batches import HeldBatch, claim_batch, expire_next, fail_batch
from vectormill.batches.processing import finalize, validate
from vectormill.batches.request_batch import VALIDATING, BatchFault
from vectormill.db.session import make_engine
from vectormill.files.roots import Roots
from vectormill.models.registry import Registry
from vectormill.objects.input import HeldInput, claim_input
from vectormill.objects.output import CLOSING, HeldOutput, claim_output
from vectormill.objects.parts import close_output, sweep
from vectormill.objects.reading import read_input
from vectormill.settings import Settings
from vectormill.work.work import Loop, handing_back

logger = logging.getLogger(__name__)


class ClaimLoop(Loop):
    """A loop that claims one piece of work after another, in threads with a connection each."""

    name: ClassVar[str]
    pause_seconds: ClassVar[float]
    num_threads: ClassVar[int] = 2  # at least, so that a small piece of work does not wait behind a large one

    def __init__(self, database_url: str, settings: Settings, owner: str) -> None:
        super().__init__(self.name, pause_seconds=self.pause_seconds, num_threads=self.num_threads)
        # Each thread needs one connection, because it reads and writes in turn.
        self._engine = make_engine(
            database_url,
            application_name=f"vectormill {self.name}",
            pool_size=self.num_threads,
            max_overflow=0,
        )
        self._settings = settings
        self._owner = owner

    def close(self) -> None:
        self._engine.dispose()


class InputLoop(ClaimLoop):
    """Read the objects of jobs for which a request had not the time, and queue these jobs."""

    name = "inputs"
    pause_seconds = 0.5

    def step(self) -> bool:
        with self._engine.begin() as connection:
            claimed = claim_input(connection, self._owner, self._settings.lease_seconds)
        if claimed is None:
            return False
        lease, wanted, collection, error = claimed
        logger.info("Reading the objects of job %s.", lease.key)
        held = HeldInput(
            engine=self._engine,
            lease=lease,
            is_stopping=self.stopping.is_set,
            wanted=wanted,
            collection=collection,
            error=error,
            settings=self._settings,
        )
        with handing_back(self._engine, lease):
            read_input(held)
        return True


class OutputLoop(ClaimLoop):
    """Write the parts and the manifest of each ended job, and later remove its staged parts."""

    name = "outputs"
    pause_seconds = 1.0

    def step(self) -> bool:
        settings = self._settings
        with self._engine.begin() as connection:
            claimed = claim_output(connection, self._owner, settings.lease_seconds)
        if claimed is None:
            return False
        lease, place = claimed
        held = HeldOutput(
            engine=self._engine,
            lease=lease,
            is_stopping=self.stopping.is_set,
            place=place,
            roots=Roots.of(settings, "output_root"),
        )
        with handing_back(self._engine, lease):
            if lease.state == CLOSING:
                close_output(held, settings.output_grace_seconds)
                logger.info("The output %s of job %s is closed.", held.url, lease.key)
            elif num_swept := sweep(held, settings.output_grace_seconds):
                logger.info("Removed %d objects from %s that are no parts of it.", num_swept, held.url)
        return True


class BatchLoop(ClaimLoop):
    """Make jobs of the lines of request batches and files of ended jobs, and expire overdue batches."""

    name = "batches"
    pause_seconds = 0.5

    def __init__(self, database_url: str, settings: Settings, registry: Registry, owner: str) -> None:
        super().__init__(database_url, settings, owner)
        self._registry = registry

    def step(self) -> bool:
        return keep_next(self._engine, self._settings, self._registry, self._owner, self.stopping)


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
