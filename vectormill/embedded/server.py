"""The base class of the embedded servers, which holds the lock on a server's files and its child process."""

import subprocess
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from vectormill.embedded.data_dir import DirectoryLock
from vectormill.processes import lifetimes as processes
from vectormill.processes.lifetimes import Ladder, end_child


class EmbeddedServer(ABC):
    """A server of a home directory. It may be started and stopped repeatedly; its URL stays the same."""

    name: ClassVar[str]
    # The steps of a stop, after which the server is killed.
    ladder: ClassVar[Ladder]

    def __init__(
        self, home: Path, *, log_path: Path | None = None, cancelled: threading.Event | None = None
    ) -> None:
        """Create the object without starting a server.

        Setting `cancelled` makes a start in progress raise StartCancelled.
        """
        self._home = home
        self._log_path = log_path or home / "logs" / f"{self.name}.log"
        self._cancelled = cancelled or threading.Event()
        self._lock: DirectoryLock | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid of the server; None while it does not run."""
        return self._process.pid if self._process is not None else None

    def start(self) -> str:
        """Start the server and return its URL.

        Raise EmbeddedServerFailed with the end of the log, AlreadyRunning or StartCancelled.
        """
        self.stop()
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    @abstractmethod
    def _start(self) -> str: ...

    def _hold(self, directory: Path) -> None:
        """Lock the directory. Raise AlreadyRunning, which names the home."""
        lock = DirectoryLock(directory / "vectormill.lock", self._home)
        lock.acquire()
        self._lock = lock

    def stop(self, timeout: float | None = None) -> None:
        """Stop the server; the first step of the ladder may take `timeout` seconds, if that is given.

        Stopping a server that is not running is not an error.
        """
        if self._process is not None:
            (number, seconds), *later = self.ladder
            end_child(self._process, ((number, seconds if timeout is None else timeout), *later))
            self._process = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def wait(self) -> None:
        """Block until the running server has ended, for whatever reason."""
        process = self._process
        if process is not None:
            processes.wait_for_group(process)
