"""Ends server processes by a ladder of signals: our own child, or what an earlier, killed parent left running."""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from vectormill.processes import lifetimes as processes

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
KILL_SECONDS = 5.0

# Each step: a signal, and the seconds to wait after it. SIGKILL comes after the last.
Ladder = Sequence[tuple[signal.Signals, float]]


def end_child(process: "subprocess.Popen[bytes]", ladder: Ladder) -> None:
    """End our child and every process of its group, and reap it. One that somebody has reaped is left alone."""
    if process.returncode is not None:
        return  # its pid may be another program's by now
    has_ended = processes.has_ended(process)
    for step, seconds in ladder:
        if has_ended:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, step)  # not send_signal, which reaps a child that has just ended
        has_ended = processes.wait_until_ended(process, seconds)
    if not has_ended:
        processes.kill_group(process.pid)
    processes.wait_for_group(process)


def end_leftovers(directory: Path, name: str, ladder: Ladder) -> None:
    """End every process of that name that works in the directory."""
    found = processes.running_in(directory, name)
    if not found:
        return
    pids = ", ".join(str(process.pid) for process in found)
    logger.info("ending %s left over from an earlier run (pid %s)", name, pids)
    for step, seconds in ladder:
        # To all: where the server itself is dead already, its children must be told one by one.
        _send(found, step)
        _wait_until_gone(found, seconds)
        found = processes.running_in(directory, name)
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
    while any(map(_is_alive, targets)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)  # they are nobody's children: there is no event to wait for


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
