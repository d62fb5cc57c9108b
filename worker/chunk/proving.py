"""Prover cuts a worker's time into periods, each ended by a proof that its model process is sound (decision 0078)."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Engine

from vectormill import __version__
from vectormill.db.outages import DATABASE_ERRORS
from vectormill.workers.proofs import begin_period, fail_period, prove_period
from worker.engine.engine import Engine as EncodingEngine
from worker.engine.request import EngineStopped
from worker.identity import WorkerIdentity

logger = logging.getLogger(__name__)

# A period keeps these entries of a worker's report, which its results depend on.
KEPT: Final = ("revision", "pooling", "device", "backend", "precision", "attention", "switches", "way")
RETRY_SECONDS: Final = 1.0


class Prover:
    """Asks for a proof every `seconds` in which something was computed. Thread-safe.

    After a bad proof the engine has ended and `read_period` raises, so nothing more is committed.
    """

    def __init__(
        self,
        database: Engine,
        encoding: EncodingEngine,
        identity: WorkerIdentity,
        seconds: float,
        on_flaw: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep what is needed. `on_flaw` is called after a bad proof, to end the worker."""
        self._database = database
        self._encoding = encoding
        self._identity = identity
        self._seconds = seconds
        self._on_flaw = on_flaw
        self._report: Mapping[str, Any] = {}
        self._period: int | None = None
        self._num_ended = 0  # model processes, when the period began
        self._is_used = False  # whether anything was computed in the period
        self._flaw = ""
        self._is_outdated = False  # whether the model is run in another way than the period says
        self._proving = threading.Lock()  # held while a period is ended or begun
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proofs", daemon=True)

    def start(self) -> None:
        """Begin the first period, of a model that was loaded, and prove from now on."""
        self._renew()
        self._thread.start()

    def expect_new_way(self) -> None:
        """Begin a new period with the next results, which a model process computes that runs in another way."""
        self._is_outdated = True

    def _renew(self) -> None:
        report = self._encoding.report()
        self._report = {"vectormill": __version__} | {name: report[name] for name in KEPT if name in report}
        self._period = self._begin()

    def stop(self) -> None:
        self._stopping.set()

    def read_period(self) -> int | None:
        """Return the id of the period for results that were computed until now.

        Raise EngineStopped after a bad proof: the results may be wrong.
        """
        self._is_used = True
        if self._flaw:
            raise EngineStopped(f"The model process is faulty: {self._flaw}")
        if self._is_outdated:
            with self._proving, suppress(*DATABASE_ERRORS):  # without a database nothing is committed either
                if self._is_outdated:
                    self._renew()
                    self._is_outdated = False
        return self._period

    def prove(self) -> str | None:
        """Re-encode known texts to verify the model process. Return the fault, or None if it did not answer.

        Later results belong to the next period, which begins before the known texts are encoded.
        """
        with self._proving:
            before, num_ended = self._period, self._num_ended
            self._is_used = False
            self._period = current = self._begin()
            flaw = self._ask()
            if flaw is None or (not flaw and self._count_ended() != num_ended):
                return None  # results of a process that has ended cannot be vouched for
        assert before is not None, "a period begins before the first proof"
        if not flaw:
            with self._database.begin() as connection:
                prove_period(connection, before)
            return ""
        self._flaw = flaw
        logger.error("The model process is faulty: %s. This worker ends.", flaw)
        self._on_flaw()
        self._record_flaw((before, current), flaw)
        return flaw

    def _ask(self) -> str | None:
        """Return the answer of the engine; None if it ends without one."""
        proof = self._encoding.prove()
        while True:
            try:
                return proof.result(timeout=RETRY_SECONDS)
            except TimeoutError:
                if not self._encoding.is_healthy():
                    return None

    def _record_flaw(self, periods: Sequence[int], flaw: str) -> None:
        """Mark the periods as failed, however long the database is away."""
        while True:
            try:
                with self._database.begin() as connection:
                    for period in periods:
                        fail_period(connection, period, flaw)
            except DATABASE_ERRORS as error:
                logger.warning("The fault could not be recorded; retrying: %s", error)
                # The worker ends after this thread, so nothing else waits, and no stop may skip the note of the fault.
                time.sleep(RETRY_SECONDS)
            else:
                return

    def _begin(self) -> int:
        self._num_ended = self._count_ended()
        identity = self._identity
        with self._database.begin() as connection:
            return begin_period(connection, identity.name, identity.incarnation, identity.model, self._report)

    def _count_ended(self) -> int:
        report = self._encoding.report()
        return int(report["num_restarts"] + report["num_exchanges"])

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            if not self._is_used:
                continue
            try:
                if self.prove():
                    return
            except DATABASE_ERRORS as error:
                logger.warning("A proof could not be recorded: %s", error)
