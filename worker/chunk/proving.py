"""Prover cuts a worker's time into periods, each ended by a proof that its model process is sound (decision 0078)."""

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Engine

from vectormill import __version__
from vectormill.workers.proofs import begin_period
from worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)

# What a period keeps of a worker's report: what its results depend on.
KEPT: Final = ("revision", "pooling", "device", "backend", "precision", "attention", "switches")


class Prover:
    """Knows the period in which results are being computed. Thread-safe."""

    def __init__(self, database: Engine, identity: WorkerIdentity) -> None:
        self._database = database
        self._identity = identity
        self._period: int | None = None
        self._report: Mapping[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def period(self) -> int | None:
        """Return the id of the current period; None before the first."""
        return self._period

    def begin(self, report: Mapping[str, Any]) -> None:
        """Begin the first period of a worker whose model was loaded, with what its report says."""
        self._report = {"vectormill": __version__} | {name: report[name] for name in KEPT if name in report}
        with self._lock, self._database.begin() as connection:
            self._period = self._begin(connection)

    def _begin(self, connection: Any) -> int:
        identity = self._identity
        return begin_period(connection, identity.name, identity.incarnation, identity.model, self._report)
