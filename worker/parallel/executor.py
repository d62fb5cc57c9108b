"""Executor: keeps one runner busy with batches, and starts it again when it dies. Knows no requests, only batches.

One thread owns the runner: it sends, receives, restarts. One batch more than the runner has at work is with it, so that
nothing waits for the next one; urgent ones come on top and are encoded first. The runner says which one it starts:
if the process dies, those are suspect and the others are not. Of several suspects each is tried again alone.
"""

import logging
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Final

from vectormill.domain.errors import ModelError
from vectormill.domain.item import ENCODING_FAILED, OUT_OF_MEMORY
from worker.loading import LoadingDisplay
from worker.model.encoder import EncoderReport
from worker.parallel.memory import MemoryReport
from worker.parallel.messages import (
    BATCHES_AHEAD,
    URGENT_BATCHES_AHEAD,
    Encode,
    Encoded,
    EncodeFailed,
    Loaded,
    LoadFailed,
    Reading,
    Started,
)
from worker.parallel.runner import Runner, RunnerLost
from worker.parallel.runner_group import RunnerGroup
from worker.parallel.starter import RunnerStarter
from worker.parallel.work import Work, WorkObserver, WorkSource

logger = logging.getLogger(__name__)

AnyRunner = Runner | RunnerGroup

LOADING: Final = "loading"
RUNNING: Final = "running"
RESTARTING: Final = "restarting"
STOPPED: Final = "stopped"
DEAD: Final = "dead"

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class ExecutorTimeouts:
    """How long a runner may take, and how often in a row it may be lost."""

    load_seconds: float
    forward_seconds: float
    max_restarts: int


class Executor:
    """Runs one replica of the model."""

    def __init__(
        self,
        starter: RunnerStarter,
        timeouts: ExecutorTimeouts,
        source: WorkSource,
        observer: WorkObserver,
        display: LoadingDisplay | None = None,
    ) -> None:
        self._starter = starter
        self._name = starter.order.card.name
        self._timeouts = timeouts
        self._source = source
        self._observer = observer
        self._display = display or LoadingDisplay(self._name)
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._is_woken = threading.Event()
        self._stopping = threading.Event()
        self._settled = threading.Event()  # the first load has succeeded or failed
        self._runner: AnyRunner | None = None
        self._outstanding: dict[int, Work] = {}  # with the runner, by number
        self._started: dict[int, float] = {}  # the numbers of those that are being encoded, and since when
        self._heard_at = 0.0
        # To be sent again before anything new: suspects, then halves and innocent batches. Urgent ones first.
        self._suspects: list[Work] = []
        self._returned: list[Work] = []
        self._next_number = 0
        self._losses_in_row = 0
        self.num_restarts = 0
        self.state = LOADING
        self.reason = ""
        self.report: EncoderReport | None = None
        self.memory: MemoryReport | None = None  # the newest

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
    def runner_pid(self) -> int | None:
        """The model's process; None while there is none."""
        runner = self._runner
        return runner.pid if runner is not None else None

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
                    self._recover(loss)
            self.state, self.reason = STOPPED, "the engine was stopped"
        except ModelError as error:
            self.state, self.reason = DEAD, str(error)
        except Exception as error:  # a dead stage stops the engine: nobody may wait for a thread that is gone
            logger.exception("The executor failed.")
            self.state, self.reason = DEAD, f"the executor failed: {error}"
        finally:
            # Who waits hands its chunk back meanwhile: a process that hangs in a driver takes half a minute to give up.
            self._source.close(self.reason)
            if self._runner is not None:
                self._runner.stop()
            self._settled.set()

    def _run_one_runner(self) -> None:
        self._runner = runner = self._starter.start()
        try:
            if not self._wait_until_loaded(runner):
                return
        finally:
            self._display.close()
        self.state, self.reason = RUNNING, ""
        self._settled.set()
        while not self._stopping.is_set():
            self._send_ahead(runner)
            self._receive_outcome(runner)

    def _wait_until_loaded(self, runner: AnyRunner) -> bool:
        """False when the executor was stopped meanwhile."""
        deadline = time.monotonic() + self._timeouts.load_seconds
        while not (message := self._hear_loading(runner, deadline)):
            if self._stopping.is_set():
                runner.kill()  # it would hear of the closed pipe only when it has loaded
                return False
            if time.monotonic() >= deadline:
                raise self._abandon(runner, f"loading took more than {self._timeouts.load_seconds:g} s")
        if isinstance(message, LoadFailed):
            if self.report is None:  # it never loaded: trying again would not help
                raise ModelError(message.reason)
            raise RunnerLost(message.reason)
        assert isinstance(message, Loaded)
        self.report = report = message.report
        self.memory = message.memory
        self._display.close(report.loadings)
        for choice in (report.device, report.backend, report.precision):
            logger.info("%s encodes with %s: %s", self._name, choice.value, choice.reason)
        for note in report.notes:
            logger.warning("%s: %s", self._name, note)
        return True

    def _hear_loading(self, runner: AnyRunner, deadline: float) -> object | None:
        """How loading has ended; None when it goes on, which is shown."""
        for message in self._listen(runner, deadline):
            if not isinstance(message, Reading):
                return message
            self._display.show(message.num_bytes_read, message.num_bytes)
        return None

    def _send_ahead(self, runner: AnyRunner) -> None:
        while (work := self._next_work()) is not None:
            if not self._outstanding:
                self._heard_at = time.monotonic()
            self._next_number += 1
            # Before it is sent: a runner that dies now takes it along.
            self._outstanding[self._next_number] = work
            runner.send(Encode(self._next_number, work.batch, work.is_urgent))

    @property
    def _has_room(self) -> bool:
        num_started = self.report.num_started if self.report is not None else 1
        return len(self._outstanding) < num_started + BATCHES_AHEAD

    def _next_work(self) -> Work | None:
        """What the runner has room for: any batch, or when it has all it needs an urgent one. A suspect goes alone."""
        if any(work.is_suspect for work in self._outstanding.values()):
            return None
        if self._suspects:
            return None if self._outstanding else self._suspects.pop(0)
        num_urgent = sum(work.is_urgent for work in self._outstanding.values())
        if not self._has_room and num_urgent >= URGENT_BATCHES_AHEAD:
            return None
        if self._returned and (self._has_room or self._returned[0].is_urgent):
            return self._returned.pop(0)
        if self._has_room:
            return self._source.next_work(is_runner_idle=not self._outstanding)
        return self._source.next_urgent_work()

    def _receive_outcome(self, runner: AnyRunner) -> None:
        """Waits for the runner's next word, for new work, or until the forward pass has taken too long."""
        deadline = self._find_deadline()
        ask_again_at = self._source.ask_again_at() if self._has_room else None
        moments = [moment for moment in (deadline, ask_again_at) if moment is not None]
        said = self._listen(runner, min(moments, default=None))
        for message in said:
            self._hear(message)
        if not said and deadline is not None and time.monotonic() >= deadline:
            self._suspect_overdue()
            raise self._abandon(runner, f"a forward pass took more than {self._timeouts.forward_seconds:g} s")

    def _find_deadline(self) -> float | None:
        """When the forward pass that was started first has taken too long; None when there is none."""
        if not self._outstanding:
            return None
        return min(self._started.values(), default=self._heard_at) + self._timeouts.forward_seconds

    def _suspect_overdue(self) -> None:
        """Those alone: what other streams do is innocent."""
        begun_before = time.monotonic() - self._timeouts.forward_seconds
        self._started = {number: at for number, at in self._started.items() if at <= begun_before}

    def _hear(self, message: object) -> None:
        """Takes note of what the runner says of a batch. Outcomes are matched by number: urgent ones overtake."""
        self._heard_at = time.monotonic()
        if isinstance(message, Started):
            self._started[message.number] = self._heard_at
        elif isinstance(message, Encoded):
            self._losses_in_row = 0
            self.memory = message.memory or self.memory
            work = self._end(message.number)
            self._observer.observe_encoded(work, message.seconds, message.memory)
            self._source.deliver(work, message.vectors, message.seconds, message.collate_seconds)
        elif isinstance(message, EncodeFailed):
            work = self._end(message.number)
            if message.is_out_of_memory:
                self._observer.observe_out_of_memory(work, message.reason)
            code = OUT_OF_MEMORY if message.is_out_of_memory else ENCODING_FAILED
            self._isolate(work, code, message.reason)

    def _end(self, number: int) -> Work:
        self._started.pop(number, None)
        return self._outstanding.pop(number)

    def _listen(self, runner: AnyRunner, deadline: float | None) -> list[object]:
        """What the runner says until the deadline; nothing when only the source has, or ranks have still to speak."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready: list[object] = list(wait([*runner.connections, self._wake_reader], timeout))
        if self._wake_reader in ready:
            self._wake_reader.recv_bytes()
            self._is_woken.clear()
            ready.remove(self._wake_reader)
        return runner.receive() if ready else []

    def _isolate(self, work: Work, code: str, reason: str) -> None:
        """One bad text fails alone: a failed batch is tried again in halves, down to a single sequence."""
        if len(work.sequences) == 1:
            self._source.fail_sequence(work.sequences[0], code, reason)
        else:
            self._return(*work.halves())

    def _return(self, *works: Work) -> None:
        self._returned = sorted([*works, *self._returned], key=lambda work: not work.is_urgent)

    def _abandon(self, runner: AnyRunner, reason: str) -> RunnerLost:
        """Ends a runner that makes no progress; where it was stands in the log."""
        for stacks in runner.stacks():
            logger.error("%s: %s, %s", self._name, reason, stacks)
        self._kill(runner)
        return RunnerLost(reason)

    def _kill(self, runner: AnyRunner) -> None:
        """What the runner had said last is heard first: else a batch that it had finished would be suspect."""
        for message in runner.kill():
            self._hear(message)

    def _recover(self, loss: RunnerLost) -> None:
        """The batch being encoded is given up; the others wait for the next runner. Of several that were being encoded
        nobody knows which it was, so that each is tried alone.

        But one that failed, as batches do on a runner that goes on, is tried again in halves: nobody loses anything.
        """
        if self._runner is not None:
            self._kill(self._runner)
            self._runner = None
        is_halved = False
        if loss.failed is not None:
            is_halved = len(self._outstanding[loss.failed.number].sequences) > 1
            self._hear(loss.failed)
        else:
            suspects = [self._end(number) for number in list(self._started)]
            if loss.is_killed:
                for work in suspects:
                    self._observer.observe_killed(work)
            if len(suspects) == 1:
                self._source.lose_work(suspects[0], str(loss))
            else:
                self._suspects += [replace(work, is_suspect=True) for work in suspects]
        self._started.clear()
        self._return(*self._outstanding.values())
        self._outstanding.clear()
        self._losses_in_row += not is_halved  # halves end by themselves, with a single sequence
        if self._losses_in_row > self._timeouts.max_restarts or self.report is None:
            raise ModelError(
                f"The model process was lost {self._losses_in_row} times in a row, at last because {loss}."
            )
        self.state, self.reason = RESTARTING, str(loss)
        self.num_restarts += 1
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 4 ** max(0, self._losses_in_row - 1))
        logger.warning("The runner was lost because %s; it is started again in %.1f s.", loss, pause)
        self._stopping.wait(pause)
