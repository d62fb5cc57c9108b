"""DeviceClock: when a made-up device is free, and for how long it has computed; in a file that several processes share.

A device of its own computes one batch after the other, in the order in which they were queued, whoever queued them.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LAYOUT: Final = struct.Struct("ddqqq")


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Sums since the file was made. `free_at` is of time.monotonic, one clock for all processes of the machine."""

    free_at: float = 0.0
    busy_seconds: float = 0.0
    num_batches: int = 0
    num_sequences: int = 0
    num_tokens: int = 0


class DeviceClock:
    """One end of the file, which is made if need be."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._file).st_size < LAYOUT.size:
            os.ftruncate(self._file, LAYOUT.size)
        self._map = mmap.mmap(self._file, LAYOUT.size)

    def queue(self, seconds: float, num_sequences: int, num_tokens: int) -> float:
        """When a batch will be done that takes so long, and begins as soon as all those before it are done."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            before = self.read()
            free_at = max(before.free_at, self._clock()) + seconds
            LAYOUT.pack_into(
                self._map,
                0,
                free_at,
                before.busy_seconds + seconds,
                before.num_batches + 1,
                before.num_sequences + num_sequences,
                before.num_tokens + num_tokens,
            )
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return free_at

    def read(self) -> DeviceReading:
        return DeviceReading(*LAYOUT.unpack_from(self._map))

    def close(self) -> None:
        self._map.close()
        os.close(self._file)
