"""Real children that die, hang, ignore signals and have children of their own; none may stay behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_for
from vectormill.processes import lifetimes as processes
from vectormill.processes.supervisor import Backoff, ChildNotReady, ChildSpec, Supervisor

ENV = {"PATH": os.defpath}
DEADLINE_SECONDS = 20.0


def shell(tmp_path: Path, name: str, script: str) -> ChildSpec:
    """A child that is ready once its log has the line `up`."""
    log = tmp_path / f"{name}.log"
    return ChildSpec(name, ("sh", "-c", script), ENV, lambda: "up" in read(log), log)


def read(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def number_in(log: Path) -> int:
    """The pid that a child wrote into its log."""
    wait_for(lambda: any(line.isdigit() for line in read(log)))
    return next(int(line) for line in read(log) if line.isdigit())


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    # Not their children in turn: a Postgres that other tests have left running starts workers of its own at any time.
    before = {child.pid for child in psutil.Process().children()}
    yield
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_dead_childs_own_children_do_not_survive_it(tmp_path: Path) -> None:
    script = "sleep 60 & echo $!; echo up; wait"
    with Supervisor([shell(tmp_path, "a", script)]) as supervisor:
        supervisor.start(DEADLINE_SECONDS)
        grandchild = number_in(tmp_path / "a.log")
        child = supervisor.pids["a"]
        assert child is not None
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: not processes.is_alive(grandchild))


def test_a_child_that_ignores_the_request_to_stop_is_killed_with_all_that_came_of_it(tmp_path: Path) -> None:
    script = "trap '' TERM; setsid sleep 60 & echo $!; sleep 60 & echo up; while :; do wait; done"
    supervisor = Supervisor([shell(tmp_path, "a", script)])
    supervisor.start(DEADLINE_SECONDS)
    log = tmp_path / "a.log"
    in_own_session = number_in(log)
    wait_for(lambda: psutil.Process(in_own_session).name() == "sleep")
    supervisor.stop(grace=0.2)
    wait_for(lambda: not processes.is_alive(in_own_session))


def test_all_children_are_asked_to_stop_at_once(tmp_path: Path) -> None:
    """Each ends only when all have been asked: asked one after the other, the first would never end."""
    asked = f"$(ls {tmp_path} | grep -c asked)"
    script = (
        f"trap 'touch {tmp_path}/asked.$$; until test {asked} = 3; do sleep 0.05; done; echo ended; exit 0' TERM; "
        "echo up; while :; do sleep 60 & wait $!; done"
    )
    names = ("a", "b", "c")
    supervisor = Supervisor([shell(tmp_path, name, script) for name in names])
    supervisor.start(DEADLINE_SECONDS)
    supervisor.stop(grace=60)
    assert [read(tmp_path / f"{name}.log")[-1] for name in names] == ["ended"] * 3
    supervisor.stop()  # again is no error


def test_a_supervisor_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    Supervisor([shell(tmp_path, "a", "true")]).stop()


def test_a_child_that_is_not_ready_in_time_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "tardy.log"

    def is_ready() -> bool:
        """Never; but however slow the machine is, the child has said something before its time is over."""
        wait_for(lambda: log.exists() and "loading" in log.read_text())
        return False

    tardy = replace(shell(tmp_path, "tardy", "echo loading; exec sleep 60"), ready=is_ready)
    with Supervisor([tardy]) as supervisor, pytest.raises(ChildNotReady) as raised:
        supervisor.start(timeout=0.5)
    assert str(raised.value) == "tardy was not ready after 0.5 s:\n    loading"


def test_a_child_that_ends_again_and_again_while_starting_is_not_waited_for(tmp_path: Path) -> None:
    broken = shell(tmp_path, "broken", "echo no such option; exit 2")
    with Supervisor([broken]) as supervisor, pytest.raises(ChildNotReady) as raised:
        supervisor.start(DEADLINE_SECONDS)
    assert str(raised.value).startswith("broken ended 3 times while starting:\n    no such option")


def test_a_start_ends_when_a_stop_is_asked_for(tmp_path: Path) -> None:
    stopping = threading.Event()
    with Supervisor([shell(tmp_path, "a", "exec sleep 60")], stopping=stopping) as supervisor:
        threading.Timer(0.2, stopping.set).start()
        assert not supervisor.start(DEADLINE_SECONDS)


def test_a_readiness_probe_may_fail_to_connect(tmp_path: Path) -> None:
    answers = iter([False, True])

    def ready() -> bool:
        if not next(answers):
            raise ConnectionRefusedError
        return True

    with Supervisor([ChildSpec("a", ("sleep", "60"), ENV, ready)]) as supervisor:
        assert supervisor.start(DEADLINE_SECONDS)


def test_pauses_grow_while_a_child_goes_on_dying() -> None:
    for runs, pauses in [
        ([0, 0, 0, 0, 0, 0, 0, 0], [0.5, 1, 2, 4, 8, 16, 30, 30]),  # doubles, up to half a minute
        ([0, 0, 59, 61, 0], [0.5, 1, 2, 0.5, 1]),  # only a minute of good health is forgiven
    ]:
        backoff = Backoff()
        assert [backoff.pause_after(ran) for ran in runs] == pauses


# In a process of its own, since a signal without a handler would end the process that runs the tests.
STOPPED = """
import os, signal, sys
from vectormill.processes.stopping import StopSignals

for number in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]:
    earlier = signal.getsignal(number)
    with StopSignals() as stopping:
        was_set = stopping.is_set()
        os.kill(os.getpid(), number)
        is_set = stopping.wait(float(sys.argv[1]))
    print(number.name, was_set, is_set, signal.getsignal(number) is earlier, flush=True)
"""


def test_a_stop_signal_sets_the_event_and_handlers_come_back() -> None:
    argv = [sys.executable, "-c", STOPPED, str(DEADLINE_SECONDS)]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=100, check=False)
    outcomes = [f"{name} False True True\n" for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    assert (ended.returncode, ended.stdout) == (0, "".join(outcomes))


def test_what_follows_a_child_is_told_how_it_ended(tmp_path: Path) -> None:
    ends: list[int] = []

    def succeed(status: int) -> ChildSpec:
        ends.append(status)
        return shell(tmp_path, "second", "echo up; exec sleep 60")

    first = replace(shell(tmp_path, "first", "echo up; kill -SEGV $$"), succeed=succeed)
    with Supervisor([first]) as supervisor:
        supervisor.start(DEADLINE_SECONDS)
        wait_for(lambda: "up" in read(tmp_path / "second.log"))
        assert ends == [-signal.SIGSEGV]
        assert list(supervisor.pids) == ["second"]


def test_children_are_exchanged_while_others_run_on_and_none_starts_after_a_stop(tmp_path: Path) -> None:
    stays, leaves, comes, late = (
        shell(
            tmp_path,
            name,
            f"trap 'echo ended; exit 0' TERM; echo {name} up; echo up; while :; do sleep 60 & wait $!; done",
        )
        for name in ("stays", "leaves", "comes", "late")
    )
    with Supervisor([stays, leaves]) as supervisor:
        supervisor.start(DEADLINE_SECONDS)
        pid = supervisor.pids["stays"]
        supervisor.change({"leaves"}, [comes], grace=60)
        assert read(tmp_path / "leaves.log")[-1] == "ended", "it has ended before another starts"
        wait_for(lambda: "up" in read(tmp_path / "comes.log"))
        assert supervisor.pids.keys() == {"stays", "comes"}
        assert supervisor.pids["stays"] == pid
        supervisor.stop(grace=60)
        supervisor.change(set(), [late])
        assert supervisor.pids.keys() == {"stays", "comes"}


def test_a_child_that_waits_to_be_restarted_leaves_at_once(tmp_path: Path) -> None:
    with Supervisor([shell(tmp_path, "dies", "echo up; sleep 0.5; exit 1")]) as supervisor:
        supervisor.start(DEADLINE_SECONDS)
        wait_for(lambda: read(tmp_path / "dies.log").count("up") > 3)  # the next pause has 4 s
        supervisor.change({"dies"}, [], grace=3)
        assert supervisor.pids == {}
