"""The environment's settings of sources: the folder that local files must lie in, and secrets by name."""

import errno
import os
from pathlib import Path
from typing import Final

from vectormill.domain.errors import SourceFailed

# No URL is longer; a device that never ends would fill the memory.
MOST_CHARS: Final = 1 << 16


def read_secret(variable: str) -> str:
    """Return the value of the named variable. Raise SourceFailed when it is not set in this process."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise SourceFailed(
            f"The environment variable {variable} is not set where the source is read; set it for `vectormill api` "
            "and `vectormill indexer`, and start them again."
        )
    return value


def read_secret_file(path: str) -> str:
    """Return the content of the named file. Raise SourceFailed, never with the content."""
    try:
        if not Path(path).is_file():
            raise FileNotFoundError(errno.ENOENT, "there is no such file")
        with Path(path).open(encoding="utf-8") as file:
            value = file.read(MOST_CHARS).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SourceFailed(
            f"The file {path}, which holds the source's URL, cannot be read: {reason}."
        ) from None
    if not value:
        raise SourceFailed(f"The file {path}, which holds the source's URL, is empty.")
    return value
