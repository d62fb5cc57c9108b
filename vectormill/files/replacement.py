"""Replacement: a file that appears whole or not at all. Knows nothing of what is written."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` for writing; it takes the place of `path` when the block ends.

    When the block raises, `path` is left as it was and the temporary file is removed. The temporary file
    lies in the same directory because only a rename within one file system is atomic; it is made by open()
    and not by tempfile because its mode shall follow the umask.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
