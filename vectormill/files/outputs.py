"""Outputs: choose the format of a file of vectors, and write it so that it appears complete or not at all."""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

from vectormill.domain.errors import InvalidOption
from vectormill.files.formats import OUTPUT_FORMATS, by_suffix, describe_outputs


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path` for writing, and rename it to `path` when the block ends.

    If the block raises, `path` is unchanged and the temporary file is removed. It is in the same directory because only
    a rename within one file system is atomic; it is made by open() and not by tempfile so that its mode follows the
    umask.
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


FORMAT_OF_SUFFIX: Final = by_suffix(OUTPUT_FORMATS.values())

Fetch = Callable[[BinaryIO, str], object]


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
    """Write vectors to `path` with `fetch(file, format)`; the file appears complete or not at all.

    Parquet and NDJSON are the bytes that the API sends. For npy, Parquet is fetched and converted to a matrix and a
    file of keys (`OUT.keys.txt`): the API's npy has no keys, and two requests could return different states.
    """
    check_output(path)
    if format != "npy":
        with open_replacement(path) as file:
            fetch(file, format)
        return
    from vectormill.files.matrices import write_matrix  # imported here, since it takes a fifth of a second

    with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", suffix=".parquet", dir=path.parent) as file:
        fetch(cast("BinaryIO", file), "parquet")
        file.flush()
        write_matrix(Path(file.name), path)
