"""The mender: encodes again what a worker committed since its last good proof, after a bad one (decision 0078)."""

import logging
import time
from typing import Final

from sqlalchemy import Engine

from vectormill.jobs.mending import list_computed_chunks, mend_chunk
from vectormill.workers.proofs import FailedPeriod, list_unrepaired_periods, note_repair

logger = logging.getLogger(__name__)

PAGE_CHUNKS: Final = 10_000
# After this time no further page is read in a round, since the dispatcher waits for it.
ROUND_SECONDS: Final = 0.2


class Mender:
    """The repairs of one scheduler's term. A new term reads all chunks from the beginning, which is harmless."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._period: FailedPeriod | None = None
        self._after = 0  # the id of the last chunk that was read for the period
        self._num_mended = self._num_suspect = self._num_missed = 0

    def mend(self) -> None:
        """Put chunks of a failed period back until all chunks were read, or the time of a round is over."""
        end = time.monotonic() + ROUND_SECONDS
        if self._period is None:
            with self._engine.connect() as connection:
                self._period = next(iter(list_unrepaired_periods(connection)), None)
            self._after = self._num_mended = self._num_suspect = self._num_missed = 0
        while self._period is not None and time.monotonic() < end:
            self._mend_page(self._period)

    def _mend_page(self, period: FailedPeriod) -> None:
        with self._engine.connect() as connection:
            last, found = list_computed_chunks(connection, period.id, self._after, PAGE_CHUNKS)
        for chunk_id in found:
            with self._engine.begin() as connection:
                is_mended = mend_chunk(connection, chunk_id, period.id, f"encoded again: {period.reason}")
            self._num_missed += is_mended is None
            self._num_mended += is_mended is True
            self._num_suspect += is_mended is False
        if last is not None:
            self._after = last
            return
        if (
            self._num_missed
        ):  # among those that were read before may be what somebody held, or halves of what was split
            self._after = self._num_missed = 0
            return
        with self._engine.begin() as connection:
            note_repair(connection, period.id)
        logger.error(
            "The worker %s was faulty: %s. %d chunks that it had committed since its last good proof are encoded "
            "again; %d cannot be, and are suspect.",
            period.worker,
            period.reason,
            self._num_mended,
            self._num_suspect,
        )
        self._period = None
