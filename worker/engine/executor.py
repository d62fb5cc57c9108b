"""Executor: keeps one runner busy with batches, and starts it again when it dies. Knows no requests, only batches.

One thread owns the runner: it sends, receives, restarts; what becomes of a batch, InFlight decides. One batch more
than the runner has at work is with it, so that nothing waits for the next one; urgent ones come on top and are encoded
first. The runner says which one it starts: if the process dies, those are suspect and the others are not. Of several
suspects each is tried again alone.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from selectors import EVENT_READ, DefaultSelector
from typing import Final

from vectormill.domain.errors import ModelError
from worker.encoder.encoder import EncoderReport
from worker.engine.in_flight import Canary, InFlight
from worker.engine.request_queue import RequestQueue
from worker.engine.tuner import Tuner
from worker.loading import LoadingDisplay
from worker.runner.memory import MemoryReport
from worker.runner.messages import Loaded, LoadFailed, Reading
from worker.runner.runner import Runner, RunnerLost
from worker.runner.runner_group import RunnerGroup
from worker.runner.starter import RunnerStarter

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
    """Limits on how long a runner may take and how often in a row it may be lost."""

    load_seconds: float
    forward_seconds: float
    max_restarts: int


# Called with every encoder that was loaded, before it gets its first batch. True: it is another one than before, and
# batches that were made for that one are to be made anew.
OnLoaded = Callable[[EncoderReport, MemoryReport | None], bool]


class Executor:
    """Runs one replica of the model, which encodes `canary` without trouble."""

    def __init__(
        self,
        starter: RunnerStarter,
        timeouts: ExecutorTimeouts,
        queue: RequestQueue,
        tuner: Tuner,
        canary: Canary,
        on_loaded: OnLoaded,
        display: LoadingDisplay | None = None,
    ) -> None:
        self._starter = starter
        self._name = starter.order.card.name
        self._timeouts = timeouts
        self._queue = queue
        self._in_flight = InFlight(queue, tuner, canary, starter.order.card.dimension)
        self._on_loaded = on_loaded
        self._display = display or LoadingDisplay(self._name)
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._wake_reader, self._wake_writer = Pipe(duplex=False)  # closes itself
        self._selector = DefaultSelector()  # of the runner at hand, and of waking
        self._is_woken = threading.Event()
        self._stopping = threading.Event()
        self._settled = threading.Event()  # the first load has succeeded or failed
        self._runner: AnyRunner | None = None
        self._is_loaded = False  # once, and has encoded the canary
        self._backend = ""  # that loads the model, if the process has named one
        self.num_restarts = 0
        self.state = LOADING
        self.reason = ""
        self.report: EncoderReport | None = None

    def start(self) -> None:
        """Start and wait until the model is loaded. Raises ModelError; the executor has ended then."""
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
        """Wake the executor, because there is new work. Never blocks: at most one byte lies in the pipe."""
        if not self._is_woken.is_set():
            self._is_woken.set()
            os.write(self._wake_writer.fileno(), b"!")

    @property
    def runner_pid(self) -> int | None:
        """Return the model's process; None while there is none."""
        runner = self._runner
        return runner.pid if runner is not None else None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state not in (STOPPED, DEAD)

    def _run(self) -> None:
        """Run one runner after another, until stopped or too many were lost."""
        try:
            while not self._stopping.is_set():
                try:
                    self._run_one_runner()
                except RunnerLost as loss:
                    self._recover(loss)
            self.state, self.reason = STOPPED, "the engine was stopped"
        except ModelError as error:
            logger.error("The engine ends: %s", error)
            self.state, self.reason = DEAD, str(error)
        except Exception as error:  # a dead stage stops the engine: nobody may wait for a thread that is gone
            logger.exception("The executor failed.")
            self.state, self.reason = DEAD, f"the executor failed: {error}"
        finally:
            # A chunk that waits is handed back meanwhile: a process that hangs in a driver takes half a minute to
            # give up.
            self._queue.close(self.reason)
            if self._runner is not None:
                self._runner.stop()
            self._settled.set()

    def _run_one_runner(self) -> None:
        self._backend = ""
        self._runner = runner = self._starter.start()
        self._watch(runner)
        try:
            if not self._wait_until_loaded(runner):
                return
            if not self._wait_until_sound(runner):
                return
        finally:
            self._display.close()
        self._is_loaded = True
        self.state, self.reason = RUNNING, ""
        self._settled.set()
        while not self._stopping.is_set():
            self._step(runner, "a forward pass", self._timeouts.forward_seconds)

    def _wait_until_loaded(self, runner: AnyRunner) -> bool:
        """Wait until the model is loaded. Return False when the executor was stopped meanwhile."""
        deadline = time.monotonic() + self._timeouts.load_seconds
        while not (message := self._hear_loading(runner, deadline)):
            if self._stopping.is_set():
                runner.kill()  # it would hear of the closed pipe only when it has loaded
                return False
            if time.monotonic() >= deadline:
                raise self._abandon(runner, f"loading took more than {self._timeouts.load_seconds:g} s")
        if isinstance(message, LoadFailed):
            if not self._is_loaded:  # it never did: trying again would not help
                raise ModelError(message.reason)
            raise RunnerLost(message.reason)
        assert isinstance(message, Loaded)
        self.report = report = message.report
        self._display.close(report.loadings)
        self._in_flight.begin(report, message.memory, is_another=self._on_loaded(report, message.memory))
        for choice in (report.device, report.backend, report.precision):
            logger.info("%s encodes with %s: %s", self._name, choice.value, choice.reason)
        for note in (*self._starter.order.card.notes, *report.notes):
            logger.warning("%s: %s", self._name, note)
        return True

    def _wait_until_sound(self, runner: AnyRunner) -> bool:
        """Wait until every stream has encoded the canary. Return False when the executor was stopped meanwhile."""
        while self._in_flight.check.is_open:
            if self._stopping.is_set():
                runner.kill()
                return False
            self._step(runner, "a known text", self._timeouts.load_seconds)
        return True

    def _hear_loading(self, runner: AnyRunner, deadline: float) -> object | None:
        """Return how loading has ended; None while it goes on, which is displayed."""
        for message in self._listen(runner, deadline):
            if not isinstance(message, Reading):
                return message
            if message.backend:
                self._backend = message.backend
            else:
                self._display.show(message.num_bytes_read, message.num_bytes)
        return None

    def _step(self, runner: AnyRunner, what: str, seconds: float) -> None:
        """Send what the runner has room for, and hear what came of it: until it speaks, until there is new work, or
        until `what` it computes has taken so many seconds.
        """
        in_flight = self._in_flight
        while (batch := in_flight.next_message()) is not None:
            runner.send(batch)
        said = self._listen(runner, min(in_flight.find_deadline(seconds), in_flight.ask_again_at()))
        for message in said:
            in_flight.hear(message)
        self._look_after(runner, what, seconds, is_silent=not said)

    def _look_after(self, runner: AnyRunner, what: str, seconds: float, *, is_silent: bool) -> None:
        """Raise RunnerLost for a runner that cannot encode a known text, or was silent for too long."""
        if flaw := self._in_flight.check.flaw:
            raise RunnerLost(f"it cannot encode a known text ({flaw})", is_sick=True)
        if is_silent and time.monotonic() >= self._in_flight.find_deadline(seconds):
            self._in_flight.suspect_overdue(seconds)
            raise self._abandon(runner, f"{what} took more than {seconds:g} s")

    def _listen(self, runner: AnyRunner, deadline: float) -> list[object]:
        """Return the runner's messages until the deadline; none if only new work came, or ranks have yet to answer."""
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        has_spoken = False
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._wake_reader:
                os.read(self._wake_reader.fileno(), 1)
                self._is_woken.clear()
            else:
                has_spoken = True
        return runner.receive() if has_spoken else []

    def _watch(self, runner: AnyRunner) -> None:
        """Watch this runner with one selector for its whole life, which is cheaper than one for each message."""
        self._selector.close()
        self._selector = DefaultSelector()
        self._selector.register(self._wake_reader, EVENT_READ)
        for connection in runner.connections:
            self._selector.register(connection, EVENT_READ)

    def _abandon(self, runner: AnyRunner, reason: str) -> RunnerLost:
        """End a runner that makes no progress, and log where it was."""
        for stacks in runner.stacks():
            logger.error("%s: %s, %s", self._name, reason, stacks)
        self._kill(runner)
        return RunnerLost(reason)

    def _kill(self, runner: AnyRunner) -> None:
        """Kill the runner. Its last messages are heard first, so that a finished batch is not suspect."""
        for message in runner.kill():
            self._in_flight.hear(message)

    def _recover(self, loss: RunnerLost) -> None:
        """Keep what is to be tried again for the next runner. Raises ModelError when too many were lost in a row."""
        if self._runner is not None:
            self._kill(self._runner)
            self._runner = None
        self._in_flight.lose(loss)
        if not self._is_loaded:
            self._leave_backend(loss)
            return
        num_lost = self._in_flight.num_lost_in_row
        if num_lost > self._timeouts.max_restarts:
            raise ModelError(
                f"The model process was lost {num_lost} times in a row, most recently because {loss}."
            )
        self.state, self.reason = RESTARTING, str(loss)
        self.num_restarts += 1
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 4 ** max(0, num_lost - 1))
        logger.warning("The runner was lost because %s; it is started again in %.1f s.", loss, pause)
        self._stopping.wait(pause)

    def _leave_backend(self, loss: RunnerLost) -> None:
        """Have the next process load the model with another backend; raise ModelError if this one is not to blame.

        The next process knows which backends there are, and says so when none is left.
        """
        if not self._backend or loss.is_foreign or loss.is_exhausted:
            raise ModelError(f"{self._name} cannot be loaded: {loss}.")
        self._starter.leave(self._backend, f"while it loaded, {loss}")
        logger.warning("%s is loaded without %s, because %s.", self._name, self._backend, loss)
