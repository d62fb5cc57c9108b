"""The stack traces of another process, which that process writes when it gets a signal.

faulthandler writes them in the signal handler itself, in C. So this also works where Python runs no handler,
because the main thread is inside a collective, a kernel or the driver of a device.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import Final

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
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if (found := os.fstat(self.fileno()).st_size) > size:
                size, grown_at = found, now
        written = os.pread(self.fileno(), min(size - start, MOST_BYTES), start)
        return written.decode(errors="replace").rstrip() or NO_ANSWER

    def close(self) -> None:
        self._file.close()
