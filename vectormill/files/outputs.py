"""Outputs: choose the format of a file of vectors, and write it so that it appears complete or not at all."""

import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from vectormill.domain.errors import InvalidOption
from vectormill.files.formats import OUTPUT_FORMATS, by_suffix, describe_outputs


def is_stream(path: Path) -> bool:
    """Return whether a path leads to a device or a pipe, which is written to and never replaced."""
    return path.exists() and not path.is_file()


@contextmanager
def open_replacement(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends, whole and durable.

    If the block raises, `path` is unchanged and nothing else is left. A file that is replaced keeps its mode, and a new
    one gets that of any new file. Where `path` is a link, the file that it leads to is replaced. With `is_private` only
    this user can read the file, and a link is replaced itself, since somebody else may have put it there.
    """
    if is_stream(path):
        with path.open("wb") as file:
            yield file
        return
    if path.is_file() and not is_private:
        # The system refuses links that others have put into a shared folder when they are opened, but not by name.
        path.open("ab").close()
        path = path.resolve()
    mode = 0o600 if is_private else stat.S_IMODE(path.stat().st_mode) if path.is_file() else None
    # In the same folder, since only a rename within one file system is atomic; "x" follows no link.
    temporary = path.with_name(f".vectormill-{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=0o666 if mode is None else mode)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


FORMAT_OF_SUFFIX: Final = by_suffix(OUTPUT_FORMATS.values())

Fetch = Callable[[Path, str], object]


def choose_format(path: Path, given: str | None = None) -> str:
    """Return the given format, or that of the file's suffix. Raise InvalidOption if it is unknown."""
    if given is not None:
        return given
    try:
        return FORMAT_OF_SUFFIX[path.suffix.lower()]
    except KeyError:
        raise InvalidOption(
            f"Cannot tell the format of {path.name} from its name: use {describe_outputs()}, or set --format."
        ) from None


def check_output(path: Path) -> None:
    """Raise InvalidOption if the file cannot be written. Call it before encoding, which may take hours."""
    if path.is_dir():
        raise InvalidOption(f"{path} is a directory; specify a file for the vectors.")
    if not path.parent.is_dir():
        raise InvalidOption(f"The directory {path.parent} of {path.name} does not exist; create it first.")


def write_vectors(fetch: Fetch, path: Path, format: str) -> None:
    """Write vectors to `path` with `fetch(path, format)`; the file appears complete or not at all.

    Parquet and NDJSON are the bytes that the API sends. For npy, Parquet is fetched and converted to a matrix and a
    file of keys (`OUT.keys.txt`): the API's npy has no keys, and two requests could return different states.
    """
    check_output(path)
    if format != "npy":
        fetch(path, format)
        return
    from vectormill.files.matrices import write_matrix  # imported here, since it takes a fifth of a second

    with tempfile.TemporaryDirectory(prefix=".vectormill-", dir=path.parent) as folder:
        rows = Path(folder, "rows.parquet")
        fetch(rows, "parquet")
        write_matrix(rows, path)
