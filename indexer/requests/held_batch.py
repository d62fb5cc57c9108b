"""HeldBatch: a claimed request batch, and the proof that it is still ours. Knows neither lines nor answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Engine

from vectormill.db.requests.batch_claims import BatchClaim, keep_batch
from vectormill.models.registry import Registry
from vectormill.settings import Settings

# Of a lease, which is renewed so often at the least by whoever works under it.
RENEWAL_SHARE: Final = 1 / 4


class Stopping(Exception):
    """The indexer is to end; its batches are handed back."""


@dataclass(slots=True)
class HeldBatch:
    """`keep` is to be called between transactions, every second at the least: it raises LeaseLost, or Stopping."""

    claim: BatchClaim
    engine: Engine
    settings: Settings
    registry: Registry
    is_stopping: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    _renewed_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._renewed_at = self.clock()

    def keep(self) -> None:
        if self.is_stopping():
            raise Stopping
        if self.clock() < self._renewed_at + RENEWAL_SHARE * self.claim.lease_seconds:
            return
        with self.engine.begin() as connection:
            keep_batch(connection, self.claim)
        self._renewed_at = self.clock()
