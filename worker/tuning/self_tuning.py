"""SelfTuning: a worker looks for the fastest way to run its model, once it is idle, or has been busy for long."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from vectormill.db.outages import DATABASE_ERRORS
from vectormill.domain.errors import ChunkError, ModelError
from worker.chunk.proving import Prover
from worker.encoder.way import Way
from worker.engine.engine import Engine
from worker.engine.executor import RESTARTING
from worker.tuning.trial import LOOK_SECONDS, TrialFailed, TrialStopped

logger = logging.getLogger(__name__)

# The worker has nothing to do when no batch has ended for this time since the first one.
IDLE_SECONDS: Final = 5.0
# A worker that is never idle is tuned all the same; the ways are then compared beside its work.
BUSY_SECONDS: Final = 600.0
# How often the ways are compared if that fails, each time when the worker is idle again.
NUM_ATTEMPTS: Final = 3
# Nothing is tried if so much of the device's memory would be in use then.
MOST_USED_SHARE: Final = 0.8
# The thread is not waited for longer: it may wait for a database to note that a process was faulty.
STOP_SECONDS: Final = 5.0


class SelfTuning:
    """A thread that compares the ways of a model, keeps what it finds for all workers, and takes the fastest one.

    `check` raises ModelError if the model in its new way is not what it should be; then it is run as usual again.
    `idle_seconds` and `busy_seconds` are those of this module, except in tests.
    """

    def __init__(
        self,
        engine: Engine,
        prover: Prover,
        check: Callable[[Engine], object] = lambda engine: None,
        idle_seconds: float = IDLE_SECONDS,
        busy_seconds: float = BUSY_SECONDS,
    ) -> None:
        self._engine = engine
        self._prover = prover
        self._check = check
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
            self._thread.join(STOP_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        for _ in range(NUM_ATTEMPTS):
            if not self._wait_until_idle():
                return
            if not self._has_room():
                self._engine.way_note = (
                    "not measured, since its device has no memory for another copy of the model"
                )
                return
            self._engine.way_note = "the ways are being compared now"
            try:
                with self._tuner.tuned(self._stopping) as record:
                    self._engine.tuned, self._engine.way_note = record, ""
                    for finding in record.findings:
                        logger.info(
                            "%s: %s", finding.way, finding.flaw or f"{finding.tokens_per_second} tokens/s"
                        )
                    if record.way != self._tuner.current:
                        self._change(record.way)
                        self._verify()
                return
            except TrialStopped:
                return
            except (TrialFailed, ChunkError, OSError, *DATABASE_ERRORS) as error:
                self._engine.way_note = f"the ways could not be compared: {error}"
                logger.warning(
                    "The fastest way to run the model was not found; it runs as before: %s.", error
                )

    def _has_room(self) -> bool:
        """Return whether a second copy of the model and its batches fit beside those in service."""
        report = self._engine.report()
        own_share = report["device_memory_bytes"] / max(1, self._engine.device.memory_bytes)
        return bool(report["memory_used_share"] + own_share <= MOST_USED_SHARE)

    def _verify(self) -> None:
        """Go back to the usual way if the model in its new way is not what it should be."""
        if self._stopping.is_set():
            return
        try:
            self._check(self._engine)
        except ModelError as error:
            logger.error("The model changes back to its usual way: %s", error)
            self._change(None)

    def _change(self, way: Way | None) -> None:
        """Move the engine to another way, between two periods of proofs; wait until the model is loaded."""
        if way is not None:
            logger.info("The model changes to %s: %s.", way, way.reason)
            self._tuner.current = way
        num_exchanges = self._engine.report()["num_exchanges"]
        exchange = self._engine.exchange(way)
        try:
            while not exchange.is_drained.wait(LOOK_SECONDS):
                if self._stopping.is_set() or not self._engine.is_healthy():
                    return
            if self._prover.prove():
                return  # the process was faulty, and the worker ends
            self._prover.expect_new_way()
        finally:
            self._engine.confirm(exchange)
        while not self._stopping.wait(LOOK_SECONDS):
            report = self._engine.report()
            if report["num_exchanges"] > num_exchanges and report["state"] != RESTARTING:
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
