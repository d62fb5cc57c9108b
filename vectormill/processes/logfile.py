"""Log files that child processes write directly. Knows nothing of who writes them.

The child has the file itself as stdout and stderr, not a pipe: it never blocks on a slow reader, and its last words
are there when its parent was killed. Files are opened for appending, so they can be shortened while they are written.
"""

import shutil
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 20 * 1024 * 1024
TAIL_BYTES = 8192


def open_log(path: Path) -> BinaryIO:
    """Return the file opened for appending, made with its directory if need be, readable by its owner only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=True)
    rotate_log(path)
    return path.open("ab", buffering=0)


def rotate_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the content of a file that grew too large to PATH.1, replacing the last such.

    The writer keeps its open file, so content is copied and then cut off; lines written in between are lost.
    """
    if path.exists() and path.stat().st_size > max_bytes:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        with path.open("r+b") as log:
            log.truncate(0)


def tail_of(path: Path | None, lines: int = 20) -> str:
    """Return the last lines of the file for an error message, indented; empty when there is nothing to show."""
    if path is None or not path.exists():
        return ""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return "".join(f"\n    {line}" for line in text.splitlines()[-lines:])
