"""SelfTuning: a worker looks for the fastest way to run its model, once it has nothing else to do."""

import logging
import threading
import time
from typing import Final

from vectormill.db.outages import DATABASE_ERRORS
from worker.chunk.proving import Prover
from worker.encoder.way import Way
from worker.engine.engine import Engine
from worker.engine.executor import RUNNING
from worker.tuning.trial import TrialFailed, TrialStopped

logger = logging.getLogger(__name__)

# The worker has nothing to do when no batch has ended for this time since the first one.
IDLE_SECONDS: Final = 5.0
# A worker that is never idle is tuned all the same; the ways are then compared beside its work.
BUSY_SECONDS: Final = 600.0


class SelfTuning:
    """A thread that compares the ways of a model, keeps what it finds for all workers, and takes the fastest one.

    `idle_seconds` and `busy_seconds` are those of this module, except in tests.
    """

    def __init__(
        self,
        engine: Engine,
        prover: Prover,
        idle_seconds: float = IDLE_SECONDS,
        busy_seconds: float = BUSY_SECONDS,
    ) -> None:
        self._engine = engine
        self._prover = prover
        self._idle_seconds = idle_seconds
        self._busy_seconds = busy_seconds
        self._tuner = engine.make_way_tuner()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="self-tuning", daemon=True)

    def start(self) -> None:
        if len(self._tuner.ways) > 1:
            self._thread.start()

    def stop(self) -> None:
        """Stop, and end the process of a way that is being tried."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if not self._wait_until_idle():
            return
        try:
            record = self._tuner.tune(self._stopping)
        except TrialStopped:
            return
        except (TrialFailed, OSError) as error:
            logger.warning(
                "The fastest way to run the model could not be found; it runs as before: %s.", error
            )
            return
        way = record.way
        for finding in record.findings:
            logger.info("%s: %s", finding.way, finding.flaw or f"{finding.tokens_per_second} tokens/s")
        if way == self._tuner.current:
            logger.info("The model goes on by %s: %s.", way, way.reason)
            return
        logger.info("The model changes to %s: %s.", way, way.reason)
        try:
            self._change(way)
        except DATABASE_ERRORS as error:
            logger.warning("The period of the former way could not be ended: %s", error)

    def _change(self, way: Way) -> None:
        """Move the engine to another way, which begins a new period of proofs."""
        self._prover.prove()
        num_restarts = self._engine.report()["num_restarts"]
        self._engine.exchange(way)
        while not self._stopping.wait(self._idle_seconds):
            report = self._engine.report()
            if report["num_restarts"] > num_restarts and report["state"] == RUNNING:
                self._prover.renew()
                return

    def _wait_until_idle(self) -> bool:
        """Wait until the engine has worked and has nothing to do. Return False if the worker stops before."""
        num_batches, busy_since = 0, None
        while not self._stopping.wait(self._idle_seconds):
            before, num_batches = num_batches, self._engine.report()["num_batches"]
            busy_since = busy_since or (time.monotonic() if num_batches else None)
            if busy_since is None:
                continue
            if num_batches == before or time.monotonic() - busy_since > self._busy_seconds:
                return True
        return False
