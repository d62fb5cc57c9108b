"""The note a running stack leaves in its data directory, so that command-line tools find it."""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vectormill.embedded.account import write_private
from vectormill.processes import lifetimes as processes

FILE_NAME = "stack.json"


@dataclass(frozen=True, slots=True)
class RunningStack:
    """The URLs of the servers of one running stack. They carry passwords, so only the owner may read the note."""

    pid: int
    started_at: float
    database_url: str
    redis_url: str
    api_url: str | None = None
    flower_url: str | None = None


def write_note(data_dir: Path, stack: RunningStack) -> None:
    """Leave the note, in place of an earlier one."""
    write_private(data_dir / FILE_NAME, json.dumps(asdict(stack), indent=2) + "\n")


def remove_note(data_dir: Path) -> None:
    """Take the note away; its absence is no error."""
    with contextlib.suppress(FileNotFoundError):
        (data_dir / FILE_NAME).unlink()


def find_running(data_dir: Path) -> RunningStack | None:
    """Return the stack that runs on this directory; None when there is none, or only the note of one that was killed.

    Raises PermissionError when the stack is another user's.
    """
    try:
        note = json.loads((data_dir.expanduser() / FILE_NAME).read_text(encoding="utf-8"))
        stack = RunningStack(**note)
    except (FileNotFoundError, ValueError, TypeError):
        return None  # none, or one of another version
    return stack if processes.is_alive(stack.pid, stack.started_at) else None
