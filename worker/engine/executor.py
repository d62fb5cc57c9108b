"""The executor keeps one runner busy with batches and starts another one when it dies.

It knows nothing about requests. One thread owns the runner: it sends, receives and restarts; InFlight
decides what becomes of each batch. The runner always has one batch more than it is computing, so that it
never waits for the next one. Urgent batches are sent in addition and are encoded first. The runner reports
each batch that it starts: if the process dies, the started batches are suspect and the others are not. If
several are suspect, each is retried alone.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from queue import Queue
from selectors import EVENT_READ, DefaultSelector
from typing import Final

from vectormill.domain.errors import ModelError
from worker.encoder.encoder import EncoderReport
from worker.encoder.way import Way
from worker.engine.in_flight import InFlight, KnownTexts
from worker.engine.request_queue import RequestQueue
from worker.engine.tuner import Tuner
from worker.loading import LoadingDisplay
from worker.runner.memory import MemoryReport
from worker.runner.messages import Loaded, LoadFailed, Reading
from worker.runner.runner import Runner, RunnerLost
from worker.runner.runner_group import RunnerGroup
from worker.runner.starter import RunnerStarter
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

AnyRunner = Runner | RunnerGroup
Proof = Future[str | None]

LOADING: Final = "loading"
RUNNING: Final = "running"
RESTARTING: Final = "restarting"
STOPPED: Final = "stopped"
DEAD: Final = "dead"

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A change to another way: the caller waits for `is_drained`, sets `is_confirmed`, and wakes the executor.

    Without a way the model is loaded as usual.
    """

    way: Way | None
    is_drained: threading.Event = field(default_factory=threading.Event)
    is_confirmed: threading.Event = field(default_factory=threading.Event)


# Called with every encoder that was loaded, before it gets its first batch.
OnLoaded = Callable[[EncoderReport, MemoryReport | None], None]
# Called with the reason if the model could not be loaded in its way, before it is loaded as usual.
OnWayLost = Callable[[str], object]


class Executor:
    """Runs one replica of the model. The model can encode the `known` texts."""

    def __init__(
        self,
        starter: RunnerStarter,
        settings: WorkerSettings,
        queue: RequestQueue,
        tuner: Tuner,
        known: KnownTexts,
        on_loaded: OnLoaded,
        on_way_lost: OnWayLost,
        display: LoadingDisplay | None = None,
    ) -> None:
        self.starter = starter
        self._name = starter.order.card.name
        self._settings = settings
        self._queue = queue
        self._in_flight = InFlight(queue, tuner, known, starter.order.card.dimension)
        self._on_loaded, self._on_way_lost = on_loaded, on_way_lost
        self._display = display or LoadingDisplay(self._name)
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._wake_reader, self._wake_writer = Pipe(duplex=False)  # closed when it is garbage-collected
        self._selector = DefaultSelector()  # watches the current runner and the wake-up pipe
        self._is_woken = threading.Event()
        self._stopping = threading.Event()
        self._settled = threading.Event()  # the first load has succeeded or failed
        self._asked: Queue[Proof] = Queue()  # proofs that were asked for
        self._proofs: list[Proof] = []  # those that the runner is giving
        self._runner: AnyRunner | None = None
        self._exchange: Exchange | None = None  # the process is drained for it
        self._is_running = (
            False  # whether the present process has loaded the model and encoded the known texts
        )
        self._is_loaded = False  # whether any runner has loaded the model and encoded the known texts
        self._backend = ""  # the backend that loads the model, once the process has named it
        self.num_restarts = 0  # after losses
        self.num_exchanges = 0
        self.state = LOADING
        self.reason = ""
        self.report: EncoderReport | None = None

    def start(self) -> None:
        """Start the executor and wait until the model is loaded.

        If that fails, end the executor and raise ModelError.
        """
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
        """Wake the executor, because there is new work. Never blocks: the pipe holds at most one byte."""
        if not self._is_woken.is_set():
            self._is_woken.set()
            os.write(self._wake_writer.fileno(), b"!")

    def prove(self) -> Proof:
        """Ask for a proof that the runner is sound: results of known texts as when the model was loaded.

        The answer is what is wrong, or empty; None if the runner ended without an answer. If something is wrong,
        the executor ends.
        """
        proof: Proof = Future()
        self._asked.put(proof)
        self.wake()
        return proof

    def exchange(self, way: Way | None) -> Exchange:
        """Run the model in another way: drain its process, and replace it as soon as the caller confirms that.

        No work is begun until then, and none is lost. If the model cannot be loaded in that way, it is loaded as usual.
        """
        self._exchange = exchange = Exchange(way)
        self.wake()
        return exchange

    def find_pid(self, rank: int = 0) -> int | None:
        """Return the process id of the model process of this rank; None while there is none."""
        runner = self._runner
        return runner.pids[rank] if runner is not None else None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state not in (STOPPED, DEAD)

    def _run(self) -> None:
        """Run one runner after another until the executor is stopped or too many runners were lost."""
        try:
            while not self._stopping.is_set():
                try:
                    self._run_one_runner()
                except RunnerLost as loss:
                    self._recover(loss)
            self.state, self.reason = STOPPED, "the engine was stopped"
        except ModelError as error:
            logger.error("The engine has stopped: %s", error)
            self.state, self.reason = DEAD, str(error)
        # If this thread dies, the engine stops: no request may wait for a thread that has ended.
        except Exception as error:
            logger.exception("The executor failed.")
            self.state, self.reason = DEAD, f"the executor failed: {error}"
        finally:
            # Close the queue first, so that waiting chunks are handed back now: a process that hangs in a
            # driver takes half a minute to stop.
            self._queue.close(self.reason)
            if self._runner is not None:
                self._runner.stop()
            self._answer(None)
            self._settled.set()

    def _answer(self, flaw: str | None) -> None:
        """Answer the proofs that the runner was giving."""
        for proof in self._proofs:
            proof.set_result(flaw)
        self._proofs = []

    def _run_one_runner(self) -> None:
        self._backend, self._is_running = "", False
        self._runner = runner = self.starter.start()
        self._watch(runner)
        try:
            if not self._wait_until_loaded(runner):
                return
            if not self._wait_until_sound(runner):
                return
        finally:
            self._display.close()
        self._is_loaded, self._is_running = True, True
        self.state, self.reason = RUNNING, ""
        self._settled.set()
        while not self._stopping.is_set():
            if self._is_exchanged(runner):
                return
            self._step(runner, "a forward pass", self._settings.forward_timeout_seconds)

    def _is_exchanged(self, runner: AnyRunner) -> bool:
        """Stop the process if it is drained and its exchange is confirmed. Return whether it was stopped."""
        exchange = self._exchange
        if exchange is None or self._proofs or not self._in_flight.is_drained:
            return False
        exchange.is_drained.set()
        if not exchange.is_confirmed.is_set() or not self._asked.empty():
            return False
        self._exchange = None
        self.starter.order = replace(self.starter.order, way=exchange.way)
        self.state, self.reason = RESTARTING, f"the model changes to {exchange.way or 'its usual way'}"
        self.num_exchanges += 1
        runner.stop()
        self._runner = None
        self._in_flight.rebuild()
        return True

    def _wait_until_loaded(self, runner: AnyRunner) -> bool:
        """Wait until the model is loaded. Return False if the executor was stopped in the meantime."""
        deadline = time.monotonic() + self._settings.model_load_timeout_seconds
        while not (message := self._receive_loading(runner, deadline)):
            if self._stopping.is_set():
                runner.kill()  # the process would notice the closed pipe only after it has loaded
                return False
            if time.monotonic() >= deadline:
                raise self._abandon(
                    runner, f"loading took more than {self._settings.model_load_timeout_seconds:g} s"
                )
        if isinstance(message, LoadFailed):
            # A model that was never loaded cannot be loaded the next time either, unless in another way.
            if not self._is_loaded and self.starter.order.way is None:
                raise ModelError(message.reason)
            raise RunnerLost(message.reason)
        assert isinstance(message, Loaded)
        self.report = report = message.report
        self._display.close(report.loadings)
        self._on_loaded(report, message.memory)
        self._in_flight.begin(report, message.memory)
        for choice in (report.device, report.backend, report.precision):
            logger.info("%s uses %s: %s", self._name, choice.value, choice.reason)
        for note in (*self.starter.order.card.notes, *report.notes):
            logger.warning("%s: %s", self._name, note)
        return True

    def _wait_until_sound(self, runner: AnyRunner) -> bool:
        """Wait until every stream has encoded the known texts.

        Return False if the executor was stopped in the meantime.
        """
        while self._in_flight.check.is_open:
            if self._stopping.is_set():
                runner.kill()
                return False
            self._step(runner, "encoding a known text", self._settings.model_load_timeout_seconds)
        return True

    def _receive_loading(self, runner: AnyRunner, deadline: float) -> object | None:
        """Return the message that ends loading; None while loading goes on. Show its progress."""
        for message in self._receive(runner, deadline):
            if not isinstance(message, Reading):
                return message
            if message.backend:
                self._backend = message.backend
            else:
                self._display.show(message.num_bytes_read, message.num_bytes)
        return None

    def _step(self, runner: AnyRunner, what: str, seconds: float) -> None:
        """Send what the runner has room for, and process its messages.

        Return when the runner has sent a message, when there is new work, or when a batch that is not full
        should be sent. Raise RunnerLost if the runner cannot encode a known text, or if `what` it computes has
        taken more than `seconds`.
        """
        in_flight = self._in_flight
        if not (self._asked.empty() or in_flight.check.is_open):
            self._proofs.append(self._asked.get())
            in_flight.prove()
        # No work is begun in a process that is about to be replaced.
        while (self._exchange is None or in_flight.check.is_open) and (
            batch := in_flight.next_message()
        ) is not None:
            runner.send(batch)
        messages = self._receive(runner, min(in_flight.find_deadline(seconds), in_flight.ask_again_at()))
        for message in messages:
            in_flight.receive(message)
        if not in_flight.check.is_open:
            self._answer("")
        if flaw := in_flight.check.flaw:
            raise RunnerLost(f"it cannot encode a known text ({flaw})", is_sick=True)
        if not messages and time.monotonic() >= in_flight.find_deadline(seconds):
            in_flight.suspect_overdue(seconds)
            raise self._abandon(runner, f"{what} took more than {seconds:g} s")

    def _receive(self, runner: AnyRunner, deadline: float) -> list[object]:
        """Wait for the runner's messages until the deadline and return them.

        The list is empty if only new work arrived, or if the other ranks have not answered yet.
        """
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        has_message = False
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._wake_reader:
                os.read(self._wake_reader.fileno(), 1)
                self._is_woken.clear()
            else:
                has_message = True
        return runner.receive() if has_message else []

    def _watch(self, runner: AnyRunner) -> None:
        """Watch this runner with one selector for its whole life. One per message would cost more."""
        self._selector.close()
        self._selector = DefaultSelector()
        self._selector.register(self._wake_reader, EVENT_READ)
        for connection in runner.connections:
            self._selector.register(connection, EVENT_READ)

    def _abandon(self, runner: AnyRunner, reason: str) -> RunnerLost:
        """Kill a runner that makes no progress and log where in its code it was.

        Return the error to raise.
        """
        for stacks in runner.stacks():
            logger.error("%s: %s, %s", self._name, reason, stacks)
        self._kill(runner)
        return RunnerLost(reason)

    def _kill(self, runner: AnyRunner) -> None:
        """Kill the runner. Process its last messages, so that a finished batch does not become suspect."""
        for message in runner.kill():
            self._in_flight.receive(message)

    def _recover(self, loss: RunnerLost) -> None:
        """Keep the lost runner's batches for the next one.

        Raise ModelError if too many runners were lost in a row.
        """
        flaw = self._in_flight.check.flaw if self._in_flight.check.has_turned else ""
        if self._runner is not None:
            self._kill(self._runner)
            self._runner = None
        self._in_flight.lose(loss)
        if self._proofs and flaw:
            self._answer(flaw)
            raise ModelError(f"The model process gives other results than when it was loaded: {flaw}.")
        self._answer(None)
        if not self._is_running and self.starter.order.way is not None:
            # What was measured before need not work now, and the model works without.
            logger.warning(
                "%s cannot be run by %s now, but as usual: %s.", self._name, self.starter.order.way, loss
            )
            if not loss.is_foreign:
                self._on_way_lost(f"its process was lost while it loaded: {loss}")
            self.starter.order = replace(self.starter.order, way=None)
            return
        if not self._is_loaded:
            self._leave_backend(loss)
            return
        num_lost = self._in_flight.num_lost_in_row
        if num_lost > self._settings.max_runner_restarts:
            raise ModelError(
                f"The model process was lost {num_lost} times in a row, most recently because {loss}."
            )
        self.state, self.reason = RESTARTING, str(loss)
        self.num_restarts += 1
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 4 ** max(0, num_lost - 1))
        logger.warning("The runner was lost because %s; restarting it in %.1f s.", loss, pause)
        self._stopping.wait(pause)

    def _leave_backend(self, loss: RunnerLost) -> None:
        """Exclude this backend from the next process, since a process was lost while it loaded with it.

        Raise ModelError if the backend is not to blame. The next process knows which backends there are, and
        reports it when none is left.
        """
        if not self._backend or loss.is_foreign or loss.is_exhausted:
            raise ModelError(f"Cannot load {self._name}: {loss}.")
        self.starter.leave(self._backend, f"while it was loading, {loss}")
        logger.warning("Loading %s without %s because %s.", self._name, self._backend, loss)
