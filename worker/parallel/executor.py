"""Executor: keeps one runner busy with batches, and starts it again when it dies. Knows no requests, only batches.

One thread owns the runner: it sends, receives, restarts. Two batches are with the runner at a time, so that it never
waits for the next one. The runner encodes in order, so that the first of them is the one being encoded: if the
process dies, that one is suspect and the other is not.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.errors import ModelError
from worker.batching.sequence import Sequence
from worker.batching.token_batch import TokenBatch
from worker.model.encoder import EncoderReport
from worker.parallel.messages import Encode, Encoded, EncodeFailed, Load, Loaded, LoadFailed
from worker.parallel.runner import Runner, RunnerLost

logger = logging.getLogger(__name__)

LOADING: Final = "loading"
RUNNING: Final = "running"
RESTARTING: Final = "restarting"
STOPPED: Final = "stopped"
DEAD: Final = "dead"

BATCHES_AHEAD: Final = 2
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Work:
    """A batch, and whose sequences it is made of."""

    sequences: tuple[Sequence, ...]
    batch: TokenBatch

    def halves(self) -> tuple["Work", "Work"]:
        middle = len(self.sequences) // 2
        return (
            Work(self.sequences[:middle], self.batch.part(0, middle)),
            Work(self.sequences[middle:], self.batch.part(middle, len(self.sequences))),
        )


class WorkSource(Protocol):
    """Where work comes from and where its outcome goes. Called from the executor's thread."""

    def next_work(self) -> Work | None: ...
    def deliver(self, work: Work, vectors: NDArray[np.float32], seconds: float) -> None: ...
    def fail_sequence(self, sequence: Sequence, reason: str) -> None: ...
    def lose_work(self, work: Work, reason: str) -> None: ...
    def close(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ExecutorTimeouts:
    """How long a runner may take, and how often in a row it may be lost."""

    load_seconds: float
    forward_seconds: float
    max_restarts: int


class Executor:
    """Runs one replica of the model."""

    def __init__(
        self, load: Load, environment: Mapping[str, str], timeouts: ExecutorTimeouts, source: WorkSource
    ) -> None:
        self._load = load
        self._environment = dict(environment)
        self._timeouts = timeouts
        self._source = source
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._is_woken = threading.Event()
        self._stopping = threading.Event()
        self._settled = threading.Event()  # the first load has succeeded or failed
        self._runner: Runner | None = None
        self._outstanding: deque[Work] = deque()  # with the runner, oldest first; at most BATCHES_AHEAD
        self._returned: deque[Work] = (
            deque()
        )  # to be sent again before anything new: halves, and innocent batches
        self._head_since = 0.0
        self._next_number = 0
        self._losses_in_row = 0
        self.num_restarts = 0
        self.state = LOADING
        self.reason = ""
        self.report: EncoderReport | None = None

    def start(self) -> None:
        """Waits until the model is loaded. Raises ModelError, and has ended then."""
        self._thread.start()
        self._settled.wait()
        if self.state == DEAD:
            self._thread.join()
            raise ModelError(self.reason)

    def stop(self) -> None:
        self._stopping.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def wake(self) -> None:
        """Says that the source has new work. At most one byte lies in the pipe, so that this never blocks."""
        if not self._is_woken.is_set():
            self._is_woken.set()
            self._wake_writer.send_bytes(b"!")

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state not in (STOPPED, DEAD)

    def _run(self) -> None:
        """The life of the executor: one runner after another, until it is stopped or too many were lost."""
        try:
            while not self._stopping.is_set():
                try:
                    self._run_one_runner()
                except RunnerLost as loss:
                    self._recover(str(loss))
            self.state, self.reason = STOPPED, "the engine was stopped"
        except ModelError as error:
            self.state, self.reason = DEAD, str(error)
        except Exception as error:  # a dead stage stops the engine: nobody may wait for a thread that is gone
            logger.exception("The executor failed.")
            self.state, self.reason = DEAD, f"the executor failed: {error}"
        finally:
            if self._runner is not None:
                self._runner.stop()
            self._settled.set()
            self._source.close(self.reason)

    def _run_one_runner(self) -> None:
        self._runner = runner = Runner(self._load, self._environment)
        if not self._wait_until_loaded(runner):
            return
        self.state, self.reason = RUNNING, ""
        self._settled.set()
        while not self._stopping.is_set():
            self._send_ahead(runner)
            self._receive_outcome(runner)

    def _wait_until_loaded(self, runner: Runner) -> bool:
        """False when the executor was stopped meanwhile."""
        deadline = time.monotonic() + self._timeouts.load_seconds
        while runner.connection not in self._wait(runner, deadline):
            if self._stopping.is_set():
                runner.kill()  # it would hear of the closed pipe only when it has loaded
                return False
            if time.monotonic() >= deadline:
                raise self._abandon(runner, f"loading took more than {self._timeouts.load_seconds:g} s")
        message = runner.receive()
        if isinstance(message, LoadFailed):
            if self.report is None:  # it never loaded: trying again would not help
                raise ModelError(message.reason)
            raise RunnerLost(message.reason)
        assert isinstance(message, Loaded)
        self.report = report = message.report
        for choice in (report.device, report.backend, report.precision):
            logger.info("%s encodes with %s: %s", self._load.order.card.name, choice.value, choice.reason)
        for note in report.notes:
            logger.warning("%s: %s", self._load.order.card.name, note)
        return True

    def _send_ahead(self, runner: Runner) -> None:
        while len(self._outstanding) < BATCHES_AHEAD:
            work = self._returned.popleft() if self._returned else self._source.next_work()
            if work is None:
                return
            if not self._outstanding:
                self._head_since = time.monotonic()
            self._outstanding.append(work)  # before it is sent: a runner that dies now takes it along
            self._next_number += 1
            runner.send(Encode(self._next_number, work.batch))

    def _receive_outcome(self, runner: Runner) -> None:
        """Waits for the oldest batch's outcome, for new work, or until the forward pass has taken too long."""
        deadline = self._head_since + self._timeouts.forward_seconds if self._outstanding else None
        if runner.connection in self._wait(runner, deadline):
            message = runner.receive()
            work = self._outstanding.popleft()
            self._head_since = time.monotonic()
            if isinstance(message, Encoded):
                self._losses_in_row = 0
                self._source.deliver(work, message.vectors, message.seconds)
            elif isinstance(message, EncodeFailed):
                self._isolate(work, message.reason)
        elif deadline is not None and time.monotonic() >= deadline:
            raise self._abandon(runner, f"a forward pass took more than {self._timeouts.forward_seconds:g} s")

    def _wait(self, runner: Runner, deadline: float | None) -> list[object]:
        """Which of the runner's pipe and the wake-up pipe can be read; both may be empty at the deadline."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready: list[object] = list(wait([runner.connection, self._wake_reader], timeout))
        if self._wake_reader in ready:
            self._wake_reader.recv_bytes()
            self._is_woken.clear()
        return ready

    def _isolate(self, work: Work, reason: str) -> None:
        """One bad text fails alone: a failed batch is tried again in halves, down to a single sequence."""
        if len(work.sequences) == 1:
            self._source.fail_sequence(work.sequences[0], reason)
        else:
            self._returned.extendleft(reversed(work.halves()))

    def _abandon(self, runner: Runner, reason: str) -> RunnerLost:
        runner.kill()
        return RunnerLost(reason)

    def _recover(self, reason: str) -> None:
        """The batch being encoded is given up as suspect; the others wait for the next runner."""
        if self._runner is not None:
            self._runner.kill()
            self._runner = None
        if self._outstanding:
            self._source.lose_work(self._outstanding.popleft(), reason)
        self._returned.extendleft(reversed(self._outstanding))
        self._outstanding.clear()
        self._losses_in_row += 1
        if self._losses_in_row > self._timeouts.max_restarts or self.report is None:
            raise ModelError(
                f"The model process was lost {self._losses_in_row} times in a row, at last because {reason}."
            )
        self.state, self.reason = RESTARTING, reason
        self.num_restarts += 1
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 4 ** (self._losses_in_row - 1))
        logger.warning("The runner was lost because %s; it is started again in %.1f s.", reason, pause)
        self._stopping.wait(pause)
