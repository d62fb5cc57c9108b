"""The lock on a data directory, which one process holds, and the note on the stack that runs there.

The lock is a flock, which the kernel releases when its holder dies, for whatever reason.
"""

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from vectormill.embedded.account import write_private
from vectormill.embedded.errors import AlreadyRunning
from vectormill.processes import lifetimes as processes

LOCK_NAME: Final = "vectormill.lock"


def read_holder(path: Path) -> int | None:
    """Return the pid in the lock file if that process runs, else None.

    The lock itself is not taken, because that would make the start of another process fail.
    """
    try:
        pid, since = path.read_text(encoding="ascii").split()
        return int(pid) if processes.is_alive(int(pid), float(since)) else None
    except (OSError, ValueError):  # nobody holds it, or a holder of another version
        return None


class DirectoryLock:
    """A lock file that contains its holder's pid, and since when it runs: a killed holder's pid becomes another's.

    The file stays when the lock is released, because removing it would be a race.
    """

    def __init__(self, path: Path, directory: Path | None = None) -> None:
        """Create a lock without taking it.

        Errors name `directory` as the locked directory, by default the lock file's.
        """
        self._path = path
        self._directory = directory or path.parent
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or raise AlreadyRunning with the pid that holds it."""
        # O_NOFOLLOW, because root may open this file in a directory that another user can write to.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode().partition(" ")[0].strip() or "unknown"
            os.close(descriptor)
            raise AlreadyRunning(
                f"another vectormill (pid {holder}) is running on {self._directory}: "
                "stop it, or use another --data-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {processes.started_at(os.getpid())}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock; releasing it twice is not an error."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


FILE_NAME = "stack.json"


@dataclass(frozen=True, slots=True)
class RunningStack:
    """The URLs of the servers of a running stack.

    They contain passwords, so only the owner may read the note with them. `api_key` is the stack's own key, where its
    API cannot tell the users of the machine apart.
    """

    pid: int
    started_at: float
    database_url: str
    redis_url: str
    api_url: str | None = None
    flower_url: str | None = None
    owner_database_url: str | None = None
    reader_database_url: str | None = None
    api_key: str | None = None


def write_note(data_dir: Path, stack: RunningStack) -> None:
    """Write the note on a running stack, replacing an earlier one."""
    told = {name: value for name, value in asdict(stack).items() if value is not None or name != "api_key"}
    write_private(data_dir / FILE_NAME, json.dumps(told, indent=2) + "\n")


def remove_note(data_dir: Path) -> None:
    """Remove the note; a missing note is not an error."""
    with contextlib.suppress(FileNotFoundError):
        (data_dir / FILE_NAME).unlink()


def find_running(data_dir: Path) -> RunningStack | None:
    """Return the stack that runs on this directory; None if none runs.

    A note that a killed stack left behind is ignored. Raise PermissionError if the stack belongs to another
    user.
    """
    try:
        note = json.loads((data_dir.expanduser() / FILE_NAME).read_text(encoding="utf-8"))
        stack = RunningStack(**note)
    except (FileNotFoundError, ValueError, TypeError):
        return None  # there is no note, or one of another version
    return stack if processes.is_alive(stack.pid, stack.started_at) else None
