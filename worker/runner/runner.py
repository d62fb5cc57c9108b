"""Runner is the parent's view of a process that holds one encoder.

It knows nothing about requests and restarts nothing.
"""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import Any, Final

from vectormill.processes.lifetimes import in_lasting_thread
from vectormill.processes.logs import chosen_format
from worker.devices.control_groups import count_oom_kills
from worker.runner.channel import NUM_BLOCKS, Channel, make_memory
from worker.runner.messages import Encode, Encoded, EncodeFailed, Load

logger = logging.getLogger(__name__)

# The process is not started by multiprocessing: that would run the parent's main module again in the child
# (here Celery's), and could not give the child another environment, which pins it to its device before torch
# is imported.
BOOTSTRAP: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[5]);"
    "from worker.runner.runner_process import main; main(*map(int, sys.argv[1:5]), *sys.argv[6:])"
)
# A forward pass never causes these signals in its own process, so somebody else must have sent them.
FOREIGN_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
STOP_TIMEOUT_SECONDS: Final = 5.0
# A process that waits inside a driver ends only when the driver answers, perhaps never. The executor must not
# wait that long.
KILL_TIMEOUT_SECONDS: Final = 20.0
# A thread of the process does nothing but read, and reads a batch in milliseconds. If that thread hangs in a
# driver, sending a batch larger than the pipe would block for ever and no other time-out would be checked.
SEND_TIMEOUT_SECONDS: Final = 60
# The longest pause between two parts of a message. A runner that sends no message at all is noticed
# elsewhere.
RECEIVE_TIMEOUT_SECONDS: Final = 60
# The signal at which a process writes the stacks of its threads. faulthandler writes them in the signal handler itself,
# in C, so this also works where Python runs no handler, because the main thread is inside a collective, a kernel or the
# driver of a device.
ASK: Final = signal.SIGUSR1
# How long to wait for the stacks. Writing takes well below a millisecond; a stopped process writes nothing,
# and its replica must not wait long.
LONGEST_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 0.1  # after this long without more output they are complete
LOOK_SECONDS: Final = 0.02
MOST_BYTES: Final = 64 << 10
NO_ANSWER: Final = "  no answer: the process is stopped or waiting inside the kernel"


def answer_with_stacks(file_descriptor: int) -> None:
    """Write the stacks of all threads to this file whenever the signal arrives, and to stderr in a crash."""
    faulthandler.register(ASK, file=file_descriptor, all_threads=True)
    faulthandler.enable()


class StackFile:
    """A file for the stacks of one child. Both processes hold it open; reading does not move its position."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - open as long as the child lives

    def fileno(self) -> int:
        return self._file.fileno()

    def ask(self, send_signal: Callable[[int], None]) -> str:
        """Signal the child and return its stacks, newest call first; a sentence if it writes none."""
        start = os.fstat(self.fileno()).st_size
        send_signal(ASK)
        size, now = start, time.monotonic()
        grown_at, deadline = now, now + LONGEST_SECONDS
        while now < deadline and (size == start or now < grown_at + QUIET_SECONDS):
            time.sleep(LOOK_SECONDS)  # nobody is told when the stacks in the file have grown
            now = time.monotonic()
            if (found := os.fstat(self.fileno()).st_size) > size:
                size, grown_at = found, now
        written = os.pread(self.fileno(), min(size - start, MOST_BYTES), start)
        return written.decode(errors="replace").rstrip() or NO_ANSWER

    def close(self) -> None:
        self._file.close()


class RunnerLost(Exception):
    """The runner's process has ended, or must be ended because it cannot go on.

    `is_exhausted`: the kernel ended it for lack of memory. `is_foreign`: somebody else ended it, with a
    signal that no program causes by itself. `is_sick`: it lives but fails with every batch. `failed` is a
    batch that failed as any batch may, but after which this process cannot go on; the batch is not to blame
    for the loss.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_exhausted: bool = False,
        is_foreign: bool = False,
        is_sick: bool = False,
        failed: EncodeFailed | None = None,
    ) -> None:
        super().__init__(reason)
        self.is_exhausted = is_exhausted
        self.is_foreign = is_foreign
        self.is_sick = is_sick
        self.failed = failed


def bound_waits(ours: socket.socket) -> None:
    """Limit how long this socket waits: without progress, a send or receive raises BlockingIOError."""
    for option, seconds in (
        (socket.SO_SNDTIMEO, SEND_TIMEOUT_SECONDS),
        (socket.SO_RCVTIMEO, RECEIVE_TIMEOUT_SECONDS),
    ):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


class Runner:
    """A started process and the channel to it. One thread uses it; any thread may drop results."""

    def __init__(self, load: Load, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._device = load.order.device.name
        self._stack_file = StackFile()
        self._num_kills = count_oom_kills()
        bound_waits(ours)
        memory = make_memory()
        self._channel = Channel(Connection(ours.detach()), memory, is_worker=True)
        # A stack: the block that was freed last is used next, so that few blocks are ever written to.
        self._free_blocks = list(range(NUM_BLOCKS))[::-1]
        self._blocks: dict[int, int] = {}  # the block of each batch that is with the process, by number
        with theirs:
            handed_down = (theirs.fileno(), memory, self._stack_file.fileno())
            level = logging.getLevelName(logger.getEffectiveLevel())
            arguments = [*map(str, (os.getpid(), *handed_down)), json.dumps(sys.path), chosen_format(), level]

            def start() -> "subprocess.Popen[bytes]":
                return subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, *arguments],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    pass_fds=handed_down,
                    start_new_session=True,  # signals to the worker's process group do not reach the child
                )

            # The kernel ends the child with the thread that started it, so that thread must last.
            self._process = in_lasting_thread(start)
        os.close(memory)  # the mapping stays
        self.send(load)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all ranks."""
        return [self.pid]

    @property
    def connection(self) -> "Connection[Any, Any]":
        return self._channel.connection

    def send(self, message: object) -> None:
        """Send a message. Raise RunnerLost if the process has ended or no longer reads."""
        block = None
        if isinstance(message, Encode) and self._free_blocks:
            block = self._blocks[message.number] = self._free_blocks.pop()
        try:
            self._channel.send(message, block)
        except BlockingIOError as error:
            raise RunnerLost(
                f"the model process has not read anything for {SEND_TIMEOUT_SECONDS} s"
            ) from error
        except OSError as error:
            raise self._find_loss() from error

    @property
    def connections(self) -> "list[Connection[Any, Any]]":
        """Return the connections to wait for before `receive`."""
        return [self.connection]

    def receive(self) -> list[Any]:
        """Wait for the next message. Raise RunnerLost if the process has ended or stops amid a message."""
        try:
            return [self._receive_one()]
        except BlockingIOError as error:
            raise RunnerLost(
                f"the model process has paused in the middle of a message for {RECEIVE_TIMEOUT_SECONDS} s"
            ) from error
        except (EOFError, OSError) as error:
            raise self._find_loss() from error

    def stacks(self) -> list[str]:
        """Return where in its code the process is, as text for people.

        This is called when the process makes no progress, before it is killed.
        """
        return [f"process {self.pid} on {self._device}:\n{self._stack_file.ask(self._process.send_signal)}"]

    def stop(self) -> None:
        """Close the pipe, so that the process ends itself at once, and wait until it has ended."""
        self.connection.close()
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stack_file.close()

    def kill(self) -> list[Any]:
        """Kill the process. Return its unread messages, so that no outcome is lost."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            self._process.wait(KILL_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error(
                "The model process %d was killed but has not exited: it is stuck in a driver and still "
                "holds its device.",
                self.pid,
            )
        self._stack_file.close()
        unread: list[Any] = []
        with contextlib.suppress(EOFError, OSError), self.connection:
            while self.connection.poll():  # also true at the end of the pipe
                unread.append(self._receive_one())
        return unread

    def _receive_one(self) -> Any:
        """Receive a message. Free the block of a finished batch when its results are dropped.

        If the results came through the pipe, the block is free at once.
        """
        message, block = self._channel.receive(self._free_blocks.append)
        if isinstance(message, Encoded | EncodeFailed):
            taken = self._blocks.pop(message.number, None)
            if taken is not None and block is None:
                self._free_blocks.append(taken)
        return message

    def _find_loss(self) -> RunnerLost:
        """Return how the process ended, after its pipe has broken."""
        try:
            status = self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return RunnerLost("the model process closed its pipe but did not exit")
        if status >= 0:
            return RunnerLost(f"the model process exited with status {status}")
        reason = f"the model process was killed by {signal.Signals(-status).name}"
        num_kills = count_oom_kills()
        if status == -signal.SIGKILL and num_kills is not None and num_kills > (self._num_kills or 0):
            return RunnerLost(f"{reason}, by the kernel for lack of memory", is_exhausted=True)
        return RunnerLost(reason, is_foreign=-status in FOREIGN_SIGNALS)
