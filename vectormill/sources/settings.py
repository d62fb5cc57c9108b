"""Environment settings of sources: the root folder of local files, and secrets that options name."""

import os
from pathlib import Path
from typing import Final

from vectormill.domain.errors import SourceFailed
from vectormill.files.roots import Roots

# No URL is longer, and without a limit an endless device file would fill the memory.
MOST_BYTES: Final = 1 << 16


def read_secret(variable: str) -> str:
    """Return the value of an environment variable. Raise SourceFailed if it is not set in this process."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise SourceFailed(
            f"The environment variable {variable} is not set in the process that reads the source; set it for "
            "`vectormill up`, or for `vectormill api` and `vectormill indexer`, and restart them. A file with "
            "the value (--url-file) needs no restart."
        )
    return value


def read_secret_file(path: str, roots: Roots) -> str:
    """Return the content of a secret file. Raise SourceFailed, without the content, if it is unusable."""
    try:
        with roots.open_file(Path(path)) as file:
            value = file.read(MOST_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SourceFailed(
            f"The file {path}, which should contain the source's URL, cannot be read: {reason}."
        ) from None
    if not value:
        raise SourceFailed(f"The file {path}, which should contain the source's URL, is empty.")
    return value
