"""What the environment tells sources: the folder that local files must lie in, and the secrets they name."""

import os
from pathlib import Path

from vectormill.domain.errors import SourceFailed


def read_secret(variable: str) -> str:
    """The value of the named variable. Raises SourceFailed when it is not set in this process."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise SourceFailed(
            f"The environment variable {variable} is not set where the source is read; set it for `vectormill api` "
            "and `vectormill indexer`, and start them again."
        )
    return value


def read_secret_file(path: str) -> str:
    """What stands in the named file. Raises SourceFailed, never with the content."""
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SourceFailed(
            f"The file {path}, which holds the source's URL, cannot be read: {reason}."
        ) from None
    if not value:
        raise SourceFailed(f"The file {path}, which holds the source's URL, is empty.")
    return value
