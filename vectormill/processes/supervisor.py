"""Keep a set of child processes running until a stop is requested.

Every child has a thread that starts it, sleeps until it ends, and restarts it; nothing polls once all are
ready. A child has its own session and process group, which is killed with it, so that no grandchild survives.
On Linux the kernel kills the children when the supervisor is killed.
"""

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vectormill.domain.errors import Unavailable
from vectormill.processes import lifetimes as processes
from vectormill.processes.logs import open_log, rotate_log, tail_of

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
HEALTHY_SECONDS = 60.0
READY_POLL_SECONDS = 0.1
LOG_CHECK_SECONDS = 60.0
# After this many ends without ever being ready, a child is considered broken.
MAX_EARLY_ENDS = 3


class ChildNotReady(Unavailable):
    """A child process did not become ready in time."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The specification of a child process: its command, its whole environment, and its readiness check.

    `ready` is called repeatedly during the start, in the thread that called start; it must return quickly and
    may raise OSError for "not ready". None: ready as soon as it runs. `log_path` receives stdout and stderr;
    None: those of the supervisor. `succeed` returns the specification of the restart after an end with this
    status (negative for a signal); None: restart the same.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready: Callable[[], bool] | None = None
    log_path: Path | None = None
    succeed: "Callable[[int], ChildSpec] | None" = None


class Backoff:
    """The pause before a restart: 0.5 s, doubled up to 30 s, and 0.5 s again after a minute's run."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE_SECONDS

    def pause_after(self, ran_seconds: float) -> float:
        """Return the seconds to wait after a run of this length has ended."""
        if ran_seconds >= HEALTHY_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return pause


class Supervisor:
    """Starts children, restarts those that die, and stops all of them. It can be used once."""

    def __init__(self, children: Sequence[ChildSpec], *, stopping: threading.Event | None = None) -> None:
        """Create the supervisor without starting children.

        Setting `stopping` ends all restarts and a start in progress; `stop` must still be called.
        """
        self._stopping = stopping or threading.Event()
        self._keepers = [_Keeper(spec, self._stopping) for spec in children]
        # Held while keepers are added, so that none starts during a stop.
        self._guard = threading.Lock()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 120.0) -> bool:
        """Start all children at once and wait until all are ready.

        Return False if a stop was requested meanwhile.

        Raise ChildNotReady, with the child's name and the end of its log, when a child is not ready after
        `timeout` seconds or ends repeatedly. Children still run then: call `stop`.
        """
        for keeper in self._keepers:
            keeper.start()
        deadline = time.monotonic() + timeout
        waiting = list(self._keepers)
        while waiting:
            if self._stopping.is_set():
                return False
            waiting = [keeper for keeper in waiting if not keeper.is_ready()]
            for keeper in waiting:
                keeper.refuse_to_wait(timeout if time.monotonic() > deadline else None)
            if waiting:
                self._stopping.wait(READY_POLL_SECONDS)
        return True

    def wait(self, other_logs: Sequence[Path] = ()) -> None:
        """Block until the stopping event is set.

        Meanwhile rotate the logs of the children and the other logs.
        """
        own_logs = [keeper.spec.log_path for keeper in self._keepers if keeper.spec.log_path is not None]
        while not self._stopping.wait(LOG_CHECK_SECONDS):
            for log in (*own_logs, *other_logs):
                rotate_log(log)

    def stop(self, grace: float = 8.0) -> None:
        """Send SIGTERM to all children at once, and SIGKILL after `grace` seconds to those that still run.

        Return when none of their processes is left. Stopping twice is not an error.
        """
        self._stopping.set()
        with self._guard:
            keepers = self._keepers
        _stop(keepers, grace)

    def change(self, leaving: Collection[str], coming: Sequence[ChildSpec], grace: float = 8.0) -> None:
        """Stop the children with these names, as `stop` does with all; then start others without waiting for them.

        Once a stop is requested, none is started. Not for several threads at once.
        """
        left = [keeper for keeper in self._keepers if keeper.spec.name in leaving]
        _stop(left, grace)
        with self._guard:
            if self._stopping.is_set():
                return
            started = [_Keeper(spec, self._stopping) for spec in coming]
            self._keepers = [*(keeper for keeper in self._keepers if keeper not in left), *started]
            for keeper in started:
                keeper.start()

    @property
    def pids(self) -> dict[str, int | None]:
        """Return the pids of the children by name; None for a child that does not run now."""
        return {keeper.spec.name: keeper.pid for keeper in self._keepers}


def _stop(keepers: "Sequence[_Keeper]", grace: float) -> None:
    deadline = time.monotonic() + grace
    for keeper in keepers:
        keeper.terminate()
    for keeper in keepers:
        keeper.join(deadline)


class _Keeper:
    """A child and the thread that keeps it running, until all children are stopped or this one is."""

    def __init__(self, spec: ChildSpec, stopping: threading.Event) -> None:
        self.spec = spec
        self._stopping = stopping
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"{spec.name}-keeper", daemon=True)
        # Held while starting and signalling, so that no child starts during a stop.
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._early_ends = 0
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        self._thread.start()

    def _keep(self) -> None:
        backoff = Backoff()
        while True:
            began = time.monotonic()
            process = self._start_child()
            if process is None:
                return
            status = processes.wait_for_group(process)
            self._process = None
            if self._is_ending():
                return
            if self.spec.succeed is not None:
                self.spec = self.spec.succeed(status)
            self._early_ends += not self._is_ready
            pause = backoff.pause_after(time.monotonic() - began)
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            logger.warning("%s ended with %s; restarting it in %.1f s", self.spec.name, how, pause)
            self._leaving.wait(pause)

    def _is_ending(self) -> bool:
        return self._stopping.is_set() or self._leaving.is_set()

    def _start_child(self) -> "subprocess.Popen[bytes] | None":
        spec = self.spec
        with self._guard, contextlib.ExitStack() as files:
            if self._is_ending():
                return None
            output = files.enter_context(open_log(spec.log_path)) if spec.log_path else None
            # SIGKILL, because once the supervisor is dead nothing would kill a child that ignores SIGTERM.
            self._process = processes.spawn(
                spec.argv, env=spec.env, output=output, death_signal=signal.SIGKILL
            )
            return self._process

    def is_ready(self) -> bool:
        if not self._is_ready and self._process is not None:
            with contextlib.suppress(OSError):
                self._is_ready = self.spec.ready is None or self.spec.ready()
        return self._is_ready

    def refuse_to_wait(self, timeout: float | None) -> None:
        """Raise ChildNotReady if the child ended too often, or if a time-out has passed.

        `timeout` is the time-out in seconds if it has passed, else None.
        """
        tail = tail_of(self.spec.log_path)
        if self._early_ends >= MAX_EARLY_ENDS:
            raise ChildNotReady(f"{self.spec.name} ended {self._early_ends} times while starting:{tail}")
        if timeout is not None:
            raise ChildNotReady(f"{self.spec.name} was not ready after {timeout:g} s:{tail}")

    def terminate(self) -> None:
        self._leaving.set()
        with self._guard:
            process = self._process
            if process is not None:
                process.send_signal(signal.SIGTERM)

    def join(self, deadline: float) -> None:
        """Wait for the child to end; at the deadline (time.monotonic) kill it with all its descendants."""
        if self._thread.ident is None:
            return  # the thread was never started
        self._thread.join(max(0.0, deadline - time.monotonic()))
        process = self._process
        if process is not None and self._thread.is_alive():
            logger.warning("%s did not stop in time and is being killed", self.spec.name)
            _kill_tree(process.pid)
            self._thread.join()


def _kill_tree(pid: int) -> None:
    """Kill the process, its group, and descendants in their own groups."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(pid).children(recursive=True)
    processes.kill_group(pid)
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):
            descendant.kill()
