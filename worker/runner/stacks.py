"""Stacks: where in its code another process is, written by that process when it is asked. Knows no runners.

faulthandler writes them in the signal's own handler, in C: also where Python runs no handler any more, because the main
thread is inside a collective, a kernel or the driver of a device.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import Final

ASK: Final = signal.SIGUSR1
# Writing takes well below a millisecond. A process that is stopped writes nothing, and its replica must not wait.
LONGEST_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 0.1  # without another word they are complete
LOOK_SECONDS: Final = 0.02
MOST_BYTES: Final = 64 << 10
NO_ANSWER: Final = "  it gave no answer: it is stopped, or waits inside the kernel"


def answer_with_stacks(file_descriptor: int) -> None:
    """Write the stacks of all threads to this file on the signal, and to stderr in a crash."""
    faulthandler.register(ASK, file=file_descriptor, all_threads=True)
    faulthandler.enable()


class StackFile:
    """A file for one child's stacks. Both processes hold it open; it is read without moving its position."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - open as long as the child lives

    def fileno(self) -> int:
        return self._file.fileno()

    def ask(self, send_signal: Callable[[int], None]) -> str:
        """Return the child's stacks, newest call first; a sentence if it writes none."""
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
