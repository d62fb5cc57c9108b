"""Where a process is, asked of it while it runs no Python handler, while it is stopped, and when it has ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT
from tests.waiting import wait_for
from worker.runner.stacks import NO_ANSWER, StackFile

# It waits in C: a handler written in Python would wait with it.
PROGRAM = """
import sys, threading
from worker.runner.stacks import answer_with_stacks
answer_with_stacks(int(sys.argv[1]))
lock = threading.Lock()
def wait_for_ever():
    print("ready", flush=True)
    with lock:
        lock.acquire()
wait_for_ever()
"""

Child = tuple["subprocess.Popen[bytes]", StackFile]


@pytest.fixture
def child() -> Iterator[Child]:
    file = StackFile()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file.fileno())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        pass_fds=[file.fileno()],
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process, file
    process.kill()
    process.communicate()
    file.close()


def test_a_process_says_where_it_waits_as_often_as_it_is_asked(child: Child) -> None:
    process, file = child
    wait_for(lambda: "in wait_for_ever" in file.ask(process.send_signal))
    again = file.ask(process.send_signal)
    assert again.count("in wait_for_ever") == 1, "what it said before is not said again"
    assert process.poll() is None, "it goes on"


@pytest.mark.parametrize("ending", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_gone_gives_no_answer_and_nobody_waits_long_for_it(
    child: Child, ending: signal.Signals
) -> None:
    process, file = child
    os.kill(process.pid, ending)
    if ending == signal.SIGKILL:
        process.wait()
    assert file.ask(process.send_signal) == NO_ANSWER
