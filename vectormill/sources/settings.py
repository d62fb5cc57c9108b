"""Environment settings of sources: the secrets that their options name."""

import os
from pathlib import Path
from typing import Final

from vectormill.domain.errors import SourceFailed
from vectormill.files.roots import Roots
from vectormill.sources.source import SqlOptions

# No URL is longer.
MOST_URL_BYTES: Final = 1 << 16


def read_url(options: SqlOptions, roots: Roots) -> tuple[str, str]:
    """Return where the URL of a database is named, and that URL. Raise SourceFailed, without it, if there is none."""
    if options.url_env:
        value = os.environ.get(options.url_env, "").strip()
        if not value:
            raise SourceFailed(
                f"The environment variable {options.url_env} is not set in the process that reads the source; set it "
                "for `vectormill up`, or for `vectormill api` and `vectormill indexer`, and restart them. A file with "
                "the value (--url-file) needs no restart."
            )
        return f"the variable {options.url_env}", value
    path = options.url_file or ""
    reason = "is empty"
    try:
        with roots.open_file(Path(path)) as file:
            value = file.read(MOST_URL_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        value, reason = "", f"cannot be read: {getattr(error, 'strerror', 'it is not text')}"
    if not value:
        raise SourceFailed(f"The file {path}, which should contain the source's URL, {reason}.")
    return f"the file {path}", value
