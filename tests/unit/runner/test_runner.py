"""What a runner's parent makes of a process that says half of something."""

import os
import socket
from multiprocessing.connection import Connection

import pytest

from worker.runner import runner
from worker.runner.channel import Channel, make_memory
from worker.runner.runner import Runner, RunnerLost, bound_waits


def test_a_process_that_stops_in_the_middle_of_a_message_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "RECEIVE_TIMEOUT_SECONDS", 1)
    ours, theirs = socket.socketpair()
    bound_waits(ours)
    waiting = object.__new__(Runner)  # without a process
    memory = make_memory()
    waiting._channel = Channel(Connection(ours.detach()), memory, is_worker=True)
    waiting._free_blocks = []
    os.close(memory)
    with theirs, waiting.connection:
        theirs.sendall(b"\0\0")  # half of the length of a message
        with pytest.raises(RunnerLost, match="in the middle of a message"):
            waiting.receive()
