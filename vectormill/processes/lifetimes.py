"""Start, recognise and end processes safely.

Parent death. On Linux a child can ask the kernel for a signal when its parent dies (prctl PR_SET_PDEATHSIG),
so that `kill -9` of a parent leaves no orphan. There are three traps:

- The kernel watches the *thread* that forked, not the process: a child started from a short-lived thread
  would be killed when that thread ends. `spawn` therefore forks on one thread that lives as long as the
  process; for children started by other means (multiprocessing), `in_lasting_thread(process.start)` does
  the same.
- A change of user clears the request, so the child makes it afterwards, in `vectormill.processes.parent_death`.
  That also needs no preexec_fn, which may deadlock when the parent has threads.
- The parent may die before the request is made: the child compares its parent's pid with the expected one.

macOS has no such request. There, Python children watch their parent in a thread (`die_with_parent`); other
programs outlive a killed parent until the next start finds them with `running_in`.
"""

import contextlib
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TypeVar

import psutil

from vectormill.processes import parent_death

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Start times are computed from the boot time, which changes slightly when the clock is adjusted.
START_TIME_TOLERANCE_SECONDS = 2.0
PARENT_WATCH_SECONDS = 1.0
END_POLL_SECONDS = 0.02
KILL_SECONDS = 5.0
_SERVER_PORTS = (20_000, 32_000)


def die_with_parent(death_signal: int = signal.SIGTERM, parent_pid: int | None = None) -> None:
    """Send this process the signal when its parent dies, for whatever reason. Call early in a Python child.

    `parent_pid` is the parent's os.getpid(), passed down by the parent; without it, the death of a parent
    before the call is not noticed. The thread that forked must outlive the child: see the module's docstring.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    if sys.platform.startswith("linux"):
        parent_death.request_death_signal(death_signal, expected)
    else:

        def watch_parent() -> None:
            while os.getppid() == expected:
                time.sleep(PARENT_WATCH_SECONDS)  # only Linux tells a child that its parent has ended
            os.kill(os.getpid(), death_signal)

        threading.Thread(target=watch_parent, name="parent-watch", daemon=True).start()


def open_child() -> ProcessPoolExecutor:
    """Return an executor of one new process, which is killed when this one ends, however that happens."""
    return ProcessPoolExecutor(
        max_workers=1,
        mp_context=get_context("spawn"),
        initializer=die_with_parent,
        initargs=(signal.SIGKILL, os.getpid()),
    )


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None = None,
    output: IO[bytes] | int | None = None,
    death_signal: int = signal.SIGTERM,
    uid: int | None = None,
    gid: int | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a program in its own session, as the given user if any. On Linux it dies with this process.

    In its own session a terminal's Ctrl-C does not reach the program, and its pid is a process group for
    `kill_group`. `output` receives stdout and stderr (None: those of this process). `env` is the child's
    whole environment (None: this process's). A program that cannot be executed ends at once with status 127
    and a sentence on stderr.
    """
    numbers = (os.getpid(), int(death_signal), -1 if uid is None else uid, -1 if gid is None else gid)
    program = shutil.which(argv[0], path=None if env is None else env.get("PATH", os.defpath)) or argv[0]
    held = [sys.executable, "-I", "-S", parent_death.__file__, *map(str, numbers), program, *argv[1:]]

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            held,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )

    return in_lasting_thread(start)


def in_lasting_thread(call: Callable[[], T]) -> T:
    """Run the call on a thread that lives as long as this process, and return or raise its outcome."""
    global _thread
    with _thread_lock:
        thread = _thread = _thread or _LastingThread()
    return thread.run(call)


class _LastingThread:
    """A daemon thread that runs calls one after the other and never ends."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="spawner", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> T:
        if threading.current_thread() is self._thread:
            return call()
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future.result()

    def _loop(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the future raises it in the caller
                future.set_exception(error)
            del call, future  # otherwise the last result would stay in memory until the next call


_thread: _LastingThread | None = None
_thread_lock = threading.Lock()


def _forget_lasting_thread() -> None:
    """Discard the thread in a forked child, where only the thread that forked exists."""
    global _thread, _thread_lock
    _thread, _thread_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_lasting_thread)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port that the kernel will not assign to outgoing connections.

    A port assigned by the kernel (bind to 0) may be used by an outgoing connection, such as one to Redis,
    before the server binds the port seconds later. Ports below 32768 are not assigned so on Linux or macOS.
    Two callers could still choose the same one of 12,000.
    """
    while True:
        port = random.randint(*_SERVER_PORTS)  # noqa: S311 - the port is not a secret
        if is_port_free(port, host):
            return port


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could bind the port now.

    Connections of an earlier server in TIME_WAIT do not count.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def started_at(pid: int) -> float | None:
    """Return the start time of the process, in seconds since the epoch; None if there is no such process."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_alive(pid: int, since: float | None = None) -> bool:
    """Return whether the process runs. A zombie does not count.

    With `since` (a result of `started_at`), a later process with the same pid does not count either.
    """
    try:
        process = psutil.Process(pid)
        if since is not None and abs(process.create_time() - since) > START_TIME_TOLERANCE_SECONDS:
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def running_in(directory: Path, name: str) -> list[psutil.Process]:
    """List live processes with this working directory whose program's name begins with `name`.

    This reliably finds a server that changes into its data directory, whereas a pid file may be stale and its
    pid reused. Only processes of this user are visible (to root, those of all users).
    """
    found = []
    for process in psutil.process_iter():
        try:
            named = process.name().startswith(name) and process.status() != psutil.STATUS_ZOMBIE
            if named and directory.samefile(process.cwd()):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # the process ended meanwhile, or belongs to another user
    return found


def kill_group(pid: int) -> None:
    """Kill every process in the process group that this pid leads or led; an empty group is not an error."""
    # macOS raises EPERM for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a child has ended, without reaping it, so that its process group's id stays reserved."""
    if process.returncode is not None or not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # another thread has reaped the child
        return True


def wait_until_ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait up to `seconds` for a child to end, without reaping it, and return whether it has ended."""
    deadline = time.monotonic() + seconds
    while not (is_over := has_ended(process)) and time.monotonic() < deadline:
        time.sleep(END_POLL_SECONDS)  # waitid has no time-out, so poll
    return is_over


def wait_for_group(process: "subprocess.Popen[bytes]") -> int:
    """Block until the child has ended, kill the rest of its process group, and return its exit status."""
    if hasattr(os, "waitid"):
        # While the child is a zombie its group id is not reused, so the kill cannot reach another group.
        with contextlib.suppress(ChildProcessError):  # another thread has reaped the child
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        kill_group(process.pid)
        return process.wait()
    status = process.wait()  # macOS before Python 3.13
    kill_group(process.pid)
    return status


# Steps of a shutdown: a signal, and the seconds to wait after it. SIGKILL follows the last step.
Ladder = Sequence[tuple[signal.Signals, float]]


def end_child(process: "subprocess.Popen[bytes]", ladder: Ladder) -> None:
    """End a child and every process of its group, and reap it.

    A child that was already reaped is left alone.
    """
    if process.returncode is not None:
        return  # the pid may be reused by another program
    is_over = has_ended(process)
    for step, seconds in ladder:
        if is_over:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, step)  # send_signal would reap a child that has just ended
        is_over = wait_until_ended(process, seconds)
    if not is_over:
        kill_group(process.pid)
    wait_for_group(process)


def end_leftovers(directory: Path, name: str, ladder: Ladder) -> None:
    """End every process with that program name that works in the directory."""
    found = running_in(directory, name)
    if not found:
        return
    pids = ", ".join(str(process.pid) for process in found)
    logger.info("ending %s left over from an earlier run (pid %s)", name, pids)
    for step, seconds in ladder:
        # Signal every process, because the server that would end its children may be dead already.
        _send(found, step)
        _wait_until_gone(found, seconds)
        found = running_in(directory, name)
        if not found:
            return
    _send(found, signal.SIGKILL)
    _wait_until_gone(found, KILL_SECONDS)


def _send(targets: list[psutil.Process], number: int) -> None:
    for process in targets:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)  # psutil checks that the pid is still the same process


def _wait_until_gone(targets: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(is_alive(each.pid, each.create_time()) for each in targets) and time.monotonic() < deadline:
        time.sleep(END_POLL_SECONDS)  # these are not children of this process, so poll
