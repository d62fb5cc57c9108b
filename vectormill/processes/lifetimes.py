"""Processes that are started, recognised and ended safely. Knows nothing of what they do.

Parent death. On Linux a child can ask the kernel for a signal when its parent dies (prctl PR_SET_PDEATHSIG), so
that `kill -9` of a parent leaves no orphan. Three traps, and how they are met here:

- The kernel watches the *thread* that forked, not the process: a child started from a short-lived thread would
  be killed when that thread ends. `spawn` therefore forks on one thread that lasts as long as the process; for
  children started by other means (multiprocessing), `in_lasting_thread(process.start)` does the same.
- A change of user clears the request, so it is made after it, in the child, by `vectormill.processes.leash`. That also
  needs no preexec_fn, which may deadlock when the parent has threads.
- The parent may die before the request is made: the child compares its parent's pid with the one it was told.

macOS has no such request. Python children watch their parent in a thread there (`die_with_parent`); other
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
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TypeVar

import psutil

from vectormill.processes import leash

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Wall-clock start times are derived from the boot time, which moves by a little when the clock is set.
START_TIME_TOLERANCE_SECONDS = 2.0
PARENT_WATCH_SECONDS = 1.0
END_POLL_SECONDS = 0.02
KILL_SECONDS = 5.0
_SERVER_PORTS = (20_000, 32_000)


def die_with_parent(death_signal: int = signal.SIGTERM, parent_pid: int | None = None) -> None:
    """Send this process the signal when its parent dies, however that happens; call it early in a Python child.

    parent_pid is the parent's os.getpid(), handed down by it; without it a parent that died before the call
    is not noticed. See the module's text for the thread that must outlive the child.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    if sys.platform.startswith("linux"):
        leash.hold_to_parent(death_signal, expected)
    else:
        watch = (death_signal, expected)
        threading.Thread(target=_watch_parent, args=watch, name="parent-watch", daemon=True).start()


def _watch_parent(death_signal: int, parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(PARENT_WATCH_SECONDS)
    os.kill(os.getpid(), death_signal)


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
    """Start a program in a session of its own, as the given user if any, dying with this process on Linux.

    The session keeps a terminal's Ctrl-C from reaching it and makes its pid a process group for `kill_group`.
    output takes both stdout and stderr (None: those of this process). env is all the child sees (None: ours).
    A program that cannot be executed ends at once with status 127 and a sentence on stderr.
    """
    numbers = (os.getpid(), int(death_signal), -1 if uid is None else uid, -1 if gid is None else gid)
    program = shutil.which(argv[0], path=None if env is None else env.get("PATH", os.defpath)) or argv[0]
    held = [sys.executable, "-I", "-S", leash.__file__, *map(str, numbers), program, *argv[1:]]

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
    """Run the call on a thread that lives as long as this process, and return or raise what it does."""
    return _lasting_thread().run(call)


class _LastingThread:
    """One daemon thread that runs calls in turn and never ends."""

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
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who knows what to do with it
                future.set_exception(error)
            del call, future  # or the last result would live until the next call


_thread: _LastingThread | None = None
_thread_lock = threading.Lock()


def _lasting_thread() -> _LastingThread:
    global _thread
    with _thread_lock:
        if _thread is None:
            _thread = _LastingThread()
        return _thread


def _forget_lasting_thread() -> None:
    """Forget the thread in a forked child, which has none but the one that forked."""
    global _thread, _thread_lock
    _thread, _thread_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_lasting_thread)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nothing listens on now, and that no outgoing connection will be given meanwhile.

    Ports the kernel hands out itself (bind to 0) are also those of outgoing connections: seconds later, when a server
    binds it, one of ours to Redis may have it. Below 32768 there are none on Linux or macOS. Two callers could still
    choose the same one of 12,000.
    """
    while True:
        port = random.randint(*_SERVER_PORTS)  # noqa: S311 - no secret
        if is_port_free(port, host):
            return port


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could bind the port now; an earlier server's connections in TIME_WAIT do not count."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def started_at(pid: int) -> float | None:
    """Return when the process was started, in seconds since the epoch; None when there is no such process."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_alive(pid: int, since: float | None = None) -> bool:
    """Return whether the process runs; with `since` (its started_at), whether it is the same one and not a later one.

    A zombie is not alive.
    """
    try:
        process = psutil.Process(pid)
        if since is not None and abs(process.create_time() - since) > START_TIME_TOLERANCE_SECONDS:
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def running_in(directory: Path, name: str) -> list[psutil.Process]:
    """List living processes with this working directory whose program's name begins with `name`.

    A server that changes into its data directory is found by that surely, where a pid file may be stale or
    its pid be another program's by now. Only processes of this user are seen (as root, of all users).
    """
    found = []
    for process in psutil.process_iter():
        try:
            named = process.name().startswith(name) and process.status() != psutil.STATUS_ZOMBIE
            if named and directory.samefile(process.cwd()):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it ended meanwhile, or is not ours to see
    return found


def kill_group(pid: int) -> None:
    """Kill every process in the group that this pid leads or led; a group that is empty is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(pid, signal.SIGKILL)


def has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Say whether our child has ended, without reaping it, so that its group's number stays taken."""
    if process.returncode is not None or not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # another thread has reaped it
        return True


def wait_until_ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait so long for our child to end, without reaping it; say whether it has."""
    deadline = time.monotonic() + seconds
    while not (is_over := has_ended(process)) and time.monotonic() < deadline:
        time.sleep(END_POLL_SECONDS)  # waitid knows no time-out
    return is_over


def wait_for_group(process: "subprocess.Popen[bytes]") -> int:
    """Block until the child has ended, kill what is left of its process group, and return its exit status."""
    if hasattr(os, "waitid"):
        # While the child is a zombie its group's number stays taken: the kill reaches that group and no other.
        with contextlib.suppress(ChildProcessError):  # somebody has waited for it already
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        kill_group(process.pid)
        return process.wait()
    status = process.wait()  # macOS before Python 3.13
    kill_group(process.pid)
    return status


# Each step: a signal, and the seconds to wait after it. SIGKILL comes after the last.
Ladder = Sequence[tuple[signal.Signals, float]]


def end_child(process: "subprocess.Popen[bytes]", ladder: Ladder) -> None:
    """End our child and every process of its group, and reap it. One that somebody has reaped is left alone."""
    if process.returncode is not None:
        return  # its pid may be another program's by now
    is_over = has_ended(process)
    for step, seconds in ladder:
        if is_over:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, step)  # not send_signal, which reaps a child that has just ended
        is_over = wait_until_ended(process, seconds)
    if not is_over:
        kill_group(process.pid)
    wait_for_group(process)


def end_leftovers(directory: Path, name: str, ladder: Ladder) -> None:
    """End every process of that name that works in the directory."""
    found = running_in(directory, name)
    if not found:
        return
    pids = ", ".join(str(process.pid) for process in found)
    logger.info("ending %s left over from an earlier run (pid %s)", name, pids)
    for step, seconds in ladder:
        # To all: where the server itself is dead already, its children must be told one by one.
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
        time.sleep(END_POLL_SECONDS)  # they are nobody's children: there is no event to wait for
