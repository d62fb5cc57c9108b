"""Measure how long the threads of an encoding process wait for cores that other processes hold. Linux tells it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from worker.devices.device import CPU, Device

# The files of all threads are read at most so often.
READ_SECONDS: Final = 1.0


class CoreWaits:
    """Counts the seconds for which a thread of the encoding process was ready and had no core, on average.

    It counts for a CPU alone, from the second number of /proc/PID/task/TID/schedstat, in nanoseconds; elsewhere
    nothing is counted. `find_pid` returns the encoding process. May be used by several threads, one at a time.
    """

    def __init__(
        self, device: Device, find_pid: Callable[[], int | None], proc: Path = Path("/proc")
    ) -> None:
        self._num_threads = device.num_threads if device.kind == CPU else 0
        self._find_pid = find_pid
        self._proc = proc
        self._pid: int | None = None
        self._waits: dict[str, int] = {}
        self._seconds = 0.0
        self._read_at = 0.0

    def read(self) -> float:
        """Return the seconds since the start."""
        now, pid = time.monotonic(), self._find_pid()
        if not self._num_threads or pid is None or (pid == self._pid and now - self._read_at < READ_SECONDS):
            return self._seconds
        waits = {}
        for file in self._proc.glob(f"{pid}/task/*/schedstat"):
            try:
                waits[file.parent.name] = int(file.read_text().split()[1])
            # The thread has just ended, or the kernel counts nothing.
            except (OSError, IndexError, ValueError):
                continue
        if pid == self._pid:  # of another process it is the first reading
            grown = sum(waits[thread] - self._waits.get(thread, 0) for thread in waits)
            self._seconds += max(grown, 0) / 1e9 / self._num_threads
        self._pid, self._waits, self._read_at = pid, waits, now
        return self._seconds
