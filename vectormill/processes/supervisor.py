"""Keeps a set of child processes running until it is told to stop. Knows nothing of what they do.

Every child has a thread that starts it, sleeps until it ends, and starts it again; nothing polls once all are ready.
A child leads a session and process group of its own, which is killed with it, so that no grandchild stays; and it is
killed by the kernel when the supervisor is (Linux), so that a killed supervisor leaves nothing behind either.
"""

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
# A child that ends so often before it was ever ready will not become so.
MAX_EARLY_ENDS = 3


class ChildNotReady(Unavailable):
    """A child process did not become ready in time."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child: what to run, with what environment (all of it), and how to tell that it is ready.

    ready is asked again and again while starting, from the thread that called start; it must answer quickly and may
    raise OSError for no. None: ready as soon as it runs. log_path takes stdout and stderr; None: the supervisor's own.
    succeed answers what is started after an end with this status (negative for a signal); None: the same again.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready: Callable[[], bool] | None = None
    log_path: Path | None = None
    succeed: "Callable[[int], ChildSpec] | None" = None


class Backoff:
    """The pause before a restart: 0.5 s, doubled up to 30 s, and 0.5 s again after a minute of good health."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE_SECONDS

    def pause_after(self, ran_seconds: float) -> float:
        """Return the seconds to wait now that a run of this length has ended."""
        if ran_seconds >= HEALTHY_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        pause = self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return pause


class Supervisor:
    """Starts children, restarts those that die, stops them all. One object is one run."""

    def __init__(self, children: Sequence[ChildSpec], *, stopping: threading.Event | None = None) -> None:
        """End every restart, and a start that is under way, once `stopping` is set; `stop` must still be called."""
        self._stopping = stopping or threading.Event()
        self._keepers = [_Keeper(spec, self._stopping) for spec in children]

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = 120.0) -> bool:
        """Start all children at once and wait until all are ready; False when a stop was asked for meanwhile.

        Raise ChildNotReady, which names the child and shows the end of its log, when one is not ready after the
        time-out (seconds) or ends again and again. Children are then still running: `stop` ends them.
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
        """Block until the stopping event is set. Keeps the logs of the children, and others, short meanwhile."""
        own_logs = [keeper.spec.log_path for keeper in self._keepers if keeper.spec.log_path is not None]
        while not self._stopping.wait(LOG_CHECK_SECONDS):
            for log in (*own_logs, *other_logs):
                rotate_log(log)

    def stop(self, grace: float = 8.0) -> None:
        """Send SIGTERM to all children at once, and SIGKILL to what is left of them after the grace (seconds).

        Returns when no process of theirs is left. Stopping twice is no error.
        """
        self._stopping.set()
        deadline = time.monotonic() + grace
        for keeper in self._keepers:
            keeper.terminate()
        for keeper in self._keepers:
            keeper.join(deadline)

    @property
    def pids(self) -> dict[str, int | None]:
        """Return the pids of the children by name; None for one that does not run now."""
        return {keeper.spec.name: keeper.pid for keeper in self._keepers}


class _Keeper:
    """One child and the thread that keeps it running."""

    def __init__(self, spec: ChildSpec, stopping: threading.Event) -> None:
        self.spec = spec
        self._stopping = stopping
        self._thread = threading.Thread(target=self._keep, name=f"{spec.name}-keeper", daemon=True)
        self._guard = threading.Lock()  # around starting and signalling: never start what is being stopped
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
            if self._stopping.is_set():
                return
            if self.spec.succeed is not None:
                self.spec = self.spec.succeed(status)
            self._early_ends += not self._is_ready
            pause = backoff.pause_after(time.monotonic() - began)
            logger.warning(
                "%s ended with %s; starting it again in %.1f s", self.spec.name, _how(status), pause
            )
            if self._stopping.wait(pause):
                return

    def _start_child(self) -> "subprocess.Popen[bytes] | None":
        spec = self.spec
        with self._guard, contextlib.ExitStack() as files:
            if self._stopping.is_set():
                return None
            output = files.enter_context(open_log(spec.log_path)) if spec.log_path else None
            # SIGKILL: a child whose supervisor was killed cannot count on being stopped later if it hesitates.
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
        """Raise ChildNotReady when the child ended too often, or when a time-out (seconds) has passed."""
        tail = tail_of(self.spec.log_path)
        if self._early_ends >= MAX_EARLY_ENDS:
            raise ChildNotReady(f"{self.spec.name} ended {self._early_ends} times while starting:{tail}")
        if timeout is not None:
            raise ChildNotReady(f"{self.spec.name} was not ready after {timeout:g} s:{tail}")

    def terminate(self) -> None:
        with self._guard:
            process = self._process
            if process is not None:
                process.send_signal(signal.SIGTERM)

    def join(self, deadline: float) -> None:
        """Wait for the child to end, and kill it and all that came of it at the deadline (monotonic)."""
        if self._thread.ident is None:
            return  # never started
        self._thread.join(max(0.0, deadline - time.monotonic()))
        process = self._process
        if process is not None and self._thread.is_alive():
            logger.warning("%s did not stop in time and is being killed", self.spec.name)
            _kill_tree(process.pid)
            self._thread.join()


def _kill_tree(pid: int) -> None:
    """Kill the process, its group, and descendants that went into groups of their own."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(pid).children(recursive=True)
    processes.kill_group(pid)
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):
            descendant.kill()


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
