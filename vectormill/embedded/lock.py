"""Holds a directory for one process, by flock: the kernel lets go when the holder dies, however it dies."""

import fcntl
import os
from pathlib import Path

from vectormill.embedded.errors import AlreadyRunning


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
        """Takes the lock, or raises AlreadyRunning naming the pid that holds it."""
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
        """Lets go; releasing twice is no error."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
