"""Inputs in the indexer: read the objects of jobs for which a request had not the time, and queue these jobs."""

import logging
from typing import Final

from vectormill.db.session import make_engine
from vectormill.objects.input import HeldInput, claim_input
from vectormill.objects.submission import read_input
from vectormill.settings import Settings
from vectormill.work.loop import Loop, handing_back

logger = logging.getLogger(__name__)

# At least two, so that a small input does not wait behind a large one.
INPUTS_AT_ONCE: Final = 2
_PAUSE_SECONDS: Final = 0.5


class InputKeeper(Loop):
    """Read inputs on threads with a connection each, while the `with` block runs."""

    def __init__(self, database_url: str, settings: Settings, owner: str) -> None:
        super().__init__("inputs", pause_seconds=_PAUSE_SECONDS, num_threads=INPUTS_AT_ONCE)
        self._engine = make_engine(
            database_url, application_name="vectormill inputs", pool_size=INPUTS_AT_ONCE, max_overflow=0
        )
        self._settings = settings
        self._owner = owner

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

    def close(self) -> None:
        self._engine.dispose()
