"""Outputs in the indexer: write the parts and the manifest of each ended job, and later remove its staged parts."""

import logging
from typing import Final

from vectormill.db.session import make_engine
from vectormill.files.roots import Roots
from vectormill.objects.closing import close_output, sweep
from vectormill.objects.output import CLOSING, HeldOutput, claim_output
from vectormill.settings import Settings
from vectormill.work.loop import Loop, handing_back

logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 1.0


class OutputKeeper(Loop):
    """Close and sweep outputs on a thread with a connection of its own, while the `with` block runs."""

    def __init__(self, database_url: str, settings: Settings, owner: str) -> None:
        super().__init__("outputs", pause_seconds=_PAUSE_SECONDS)
        self._engine = make_engine(
            database_url, application_name="vectormill outputs", pool_size=1, max_overflow=0
        )
        self._settings = settings
        self._owner = owner

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

    def close(self) -> None:
        self._engine.dispose()
