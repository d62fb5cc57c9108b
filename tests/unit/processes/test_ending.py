"""A server's child is ended with its whole group, on whichever step of the ladder it ends."""

import os
import signal

import pytest

from tests.waiting import wait_for
from vectormill.embedded.ending import Ladder, end_child
from vectormill.processes import lifetimes as processes

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
