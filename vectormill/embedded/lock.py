"""Holds a directory for one process, by flock: the kernel lets go when the holder dies, however it dies."""

import fcntl
import os
from pathlib import Path
from typing import Final

from vectormill.embedded.errors import AlreadyRunning
from vectormill.processes import lifetimes as processes

LOCK_NAME: Final = "vectormill.lock"


def read_holder(path: Path) -> int | None:
    """Return the pid that the lock file names if that process runs. Take no lock: another's start would fail by it."""
    try:
        pid = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return pid if processes.is_alive(pid) else None


class DirectoryLock:
    """A lock file that names its holder's pid. The file stays when it is released: to remove it would be a race."""

    def __init__(self, path: Path, directory: Path | None = None) -> None:
        """directory is what the error calls the thing that is held; by default the lock file's own."""
        self._path = path
        self._directory = directory or path.parent
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or raise AlreadyRunning with the pid that holds it."""
        # O_NOFOLLOW: as root we open this in directories that another user may write.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode().strip() or "unknown"
            os.close(descriptor)
            raise AlreadyRunning(
                f"another vectormill (pid {holder}) is running on {self._directory}; "
                "stop it, or give another --data-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go; releasing twice is no error."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
