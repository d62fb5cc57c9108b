"""CardUse: how many of the processes that share a GPU compute at one moment.

Each of them holds a lock on a byte of its own in a file of the GPU while it has batches there, and counts the locks of
the others. The kernel releases those of a process that ends in whatever way.
"""

import fcntl
import os
import secrets
import struct
from pathlib import Path
from typing import Final

FOLDER: Final = "shared-gpus"
NUM_PLACES: Final = 1 << 62
# struct flock of Linux: type, whence, start, length, pid.
LOCK: Final = struct.Struct("@hhqqi4x")


class CardUse:
    """This process's use of a GPU. `enter` and `leave` are called by one thread, as its batches begin and end."""

    def __init__(self, cache_dir: Path, card: str) -> None:
        """Raise OSError if the folder has no locks."""
        folder = cache_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # It stays open, since closing a file releases all locks of the process on it.
        self._file = os.open(folder / card.replace("/", "-"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._place = secrets.randbelow(NUM_PLACES)
        self._num_begun = 0
        self.enter()
        self.leave()

    def enter(self) -> float:
        """Return the share of the GPU's time that a batch has as it begins."""
        self._num_begun += 1
        if self._num_begun == 1:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        return self._find_share()

    def leave(self) -> float:
        """Return the share of the GPU's time that a batch has as it ends."""
        share = self._find_share()
        self._num_begun -= 1
        if not self._num_begun:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)
        return share

    def _find_share(self) -> float:
        return 1 / (1 + self._count_others(0, NUM_PLACES))

    def _count_others(self, start: int, end: int) -> int:
        """Return how many other processes hold a lock between these places. The kernel names any one of them."""
        if start == end:  # a length of 0 would mean the whole file
            return 0
        asked = LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        kind, _, found, *_ = LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return 0
        return 1 + self._count_others(start, found) + self._count_others(found + 1, end)
