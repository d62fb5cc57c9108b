"""Children that die with their parent, whatever thread started them, and pids that are not mistaken."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_for
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import Ladder, end_child

# Programs that run until they are ended: no test waits for their long sleep.
IMPORT = "from vectormill.processes import lifetimes as processes"
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
ENV = {"PATH": os.defpath}

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has PR_SET_PDEATHSIG")


def child_of_a_parent(body: str) -> tuple["subprocess.Popen[str]", int]:
    """A parent process that runs the body, prints its child's pid and waits; and that pid."""
    # The parent sleeps until the test kills it, and so does every child below; no test waits for that.
    program = f"import os, sys, threading, time\n{IMPORT}\n{body}\ntime.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def kill_and_reap(parent: "subprocess.Popen[str]") -> None:
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()


def wait_until_gone(pid: int, timeout: float = 60) -> bool:
    deadline = time.monotonic() + timeout
    while processes.is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)  # it is nobody's child any more, so there is no event to wait for
    return not processes.is_alive(pid)


@on_linux
def test_a_spawned_program_dies_when_its_parent_is_killed() -> None:
    parent, child = child_of_a_parent(
        "child = processes.spawn(['sleep', '60'], env=dict(PATH=os.defpath)); print(child.pid, flush=True)"
    )
    assert processes.is_alive(child)
    kill_and_reap(parent)
    assert wait_until_gone(child)


def test_a_spawned_program_outlives_the_thread_that_asked_for_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        child = pool.submit(processes.spawn, SLEEP, env=ENV).result()
    try:
        # The pool's thread has ended. Had it forked, the kernel would have sent the signal by now.
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
    finally:
        child.kill()
        child.wait()


@on_linux
def test_a_spawned_program_receives_the_chosen_signal() -> None:
    body = """
trap = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); "
trap += "print(1, flush=True); time.sleep(60)"
read, write = os.pipe()
child = processes.spawn([sys.executable, "-c", trap], env={}, output=write, death_signal=2)
os.read(read, 1)
print(child.pid, flush=True)"""
    parent, child = child_of_a_parent(body)
    kill_and_reap(parent)
    assert wait_until_gone(child)


def test_a_python_child_that_asks_to_dies_with_its_parent() -> None:
    child_program = (
        "import sys, time; from vectormill.processes.lifetimes import die_with_parent; "
        "die_with_parent(9, int(sys.argv[1])); print(1, flush=True); time.sleep(60)"
    )
    body = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", {child_program!r}, str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)"""
    parent, child = child_of_a_parent(body)
    assert processes.is_alive(child)
    kill_and_reap(parent)
    assert wait_until_gone(child)


@on_linux
def test_a_child_whose_parent_died_before_it_asked_dies_at_once() -> None:
    program = (
        "from vectormill.processes.lifetimes import die_with_parent;"
        "die_with_parent(15, 2**22 + 1); print('alive')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@on_linux
def test_a_program_that_became_another_user_still_dies_with_its_parent() -> None:
    parent, child = child_of_a_parent(
        "child = processes.spawn(['sleep', '60'], env=dict(PATH=os.defpath), cwd='/', uid=65534, gid=65534)\n"
        "import psutil\n"
        "while psutil.Process(child.pid).name() != 'sleep' and child.poll() is None: time.sleep(0.01)\n"
        "print(child.pid, flush=True)"
    )
    running = psutil.Process(child)
    assert set(running.uids()) == {65534}
    assert set(running.gids()) == {65534}
    kill_and_reap(parent)
    assert wait_until_gone(child)


def test_a_program_that_cannot_be_executed_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        child = processes.spawn([str(tmp_path / "missing")], env=ENV, output=output)
    assert child.wait(100) == 127
    assert log.read_text() == f"{tmp_path / 'missing'} cannot be started: No such file or directory.\n"


def test_a_spawned_program_sees_the_given_environment_and_default_signals(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "import os, signal; print(os.environ['A'], 'HOME' in os.environ, signal.getsignal(2).__name__)"
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with log.open("wb") as output:
            child = processes.spawn([sys.executable, "-c", program], env={"A": "b"}, output=output)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert child.wait(100) == 0
    assert log.read_text() == "b False default_int_handler\n"


def test_killing_a_group_ends_grandchildren() -> None:
    read, write = os.pipe()
    child = processes.spawn(["sh", "-c", "sleep 60 & echo $!; wait"], env=ENV, output=write)
    os.close(write)
    grandchild = int(os.read(read, 32))
    os.close(read)
    processes.kill_group(child.pid)
    assert processes.wait_for_group(child) == -signal.SIGKILL
    assert wait_until_gone(grandchild)
    processes.kill_group(child.pid)  # an empty group is no error


def test_a_pid_in_use_by_a_later_process_is_not_taken_for_the_earlier() -> None:
    since = processes.started_at(os.getpid())
    assert since is not None
    assert processes.is_alive(os.getpid())
    assert processes.is_alive(os.getpid(), since)
    assert not processes.is_alive(os.getpid(), since - 60)


def test_a_zombie_is_not_alive() -> None:
    child = processes.spawn(["true"], env=ENV)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not processes.is_alive(child.pid)
    child.wait()
    assert processes.started_at(child.pid) is None


def test_a_server_is_found_by_its_directory(tmp_path: Path) -> None:
    child = processes.spawn(["sleep", "60"], env=ENV, cwd=tmp_path)
    try:
        while psutil.Process(child.pid).name() != "sleep":  # until what starts it has become the program
            pass
        assert [process.pid for process in processes.running_in(tmp_path, "sleep")] == [child.pid]
        assert processes.running_in(tmp_path, "postgres") == []
        assert processes.running_in(tmp_path.parent, "sleep") == []
    finally:
        child.kill()
        child.wait()


def test_a_free_port_can_be_bound_and_is_then_not_free() -> None:
    port = processes.free_port()
    assert processes.is_port_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not processes.is_port_free(port)


@pytest.mark.parametrize("nested", [False, True], ids=["from any thread", "from the lasting thread itself"])
def test_calls_run_on_one_lasting_thread(nested: bool) -> None:
    def where() -> threading.Thread:
        return threading.current_thread()

    call: Callable[[], threading.Thread] = (lambda: processes.in_lasting_thread(where)) if nested else where
    first, second = processes.in_lasting_thread(call), processes.in_lasting_thread(call)
    assert first is second
    assert first is not threading.current_thread()
    assert first.is_alive()


def test_an_error_on_the_lasting_thread_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        processes.in_lasting_thread(lambda: 1 // 0)
    assert processes.in_lasting_thread(lambda: 2) == 2


def test_a_forked_child_has_a_lasting_thread_of_its_own() -> None:
    processes.in_lasting_thread(int)
    program = (
        f"import os\n{IMPORT}\nprocesses.in_lasting_thread(int)\npid = os.fork()\n"
        "if pid == 0: os._exit(processes.in_lasting_thread(lambda: 7))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.stdout == "7\n"


POLITE = "sleep 60 & echo $!; exec sleep 60"
DEAF = "trap '' TERM; sleep 60 & echo $!; while :; do wait; done"
ONE_STEP: Ladder = ((signal.SIGTERM, 30.0),)
TWO_STEPS: Ladder = ((signal.SIGTERM, 30.0), (signal.SIGQUIT, 30.0))
SHORT: Ladder = ((signal.SIGTERM, 0.1),)


@pytest.mark.parametrize(
    ("script", "ladder", "status"),
    [
        (POLITE, ONE_STEP, -signal.SIGTERM),
        (POLITE, TWO_STEPS, -signal.SIGTERM),  # it ends before the last step
        (DEAF, SHORT, -signal.SIGKILL),
    ],
)
def test_a_child_that_is_ended_leaves_nothing_of_its_group_behind(
    monkeypatch: pytest.MonkeyPatch, script: str, ladder: Ladder, status: int
) -> None:
    read, write = os.pipe()
    child = processes.spawn(["sh", "-c", script], env={"PATH": os.environ["PATH"]}, output=write)
    os.close(write)
    grandchild = int(os.read(read, 32))
    os.close(read)
    kill_group = processes.kill_group
    reaped: list[bool] = []

    def note_and_kill(pid: int) -> None:
        reaped.append(child.returncode is not None)
        kill_group(pid)

    monkeypatch.setattr(processes, "kill_group", note_and_kill)
    end_child(child, ladder)
    assert child.returncode == status
    wait_for(lambda: not processes.is_alive(grandchild))
    assert reaped, "the group was never killed"
    assert not any(reaped), "the group was killed by a number that may be another's"
