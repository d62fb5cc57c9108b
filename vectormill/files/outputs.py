"""Outputs: choose the format of a file of vectors, and write it so that it appears complete or not at all.

Whatever this project writes for its users is written by `open_replacement`.
"""

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import BinaryIO, Final

from vectormill.domain.errors import InvalidOption
from vectormill.files.formats import OUTPUT_FORMATS, by_suffix, describe_outputs

STDIN: Final = Path("/dev/stdin")
STDOUT: Final = Path("/dev/stdout")
DRAFT: Final = ".vectormill-"  # begins the names of files that are not whole yet
MOST_LINKS: Final = 40  # as Linux follows


def find_target(path: Path) -> Path:
    """Return the file that a path leads to through links of this user or of root; it need not exist.

    Somebody else's link may have been put there so that this user overwrites one of their own files. Raise OSError.
    """
    target = path
    for _ in range(MOST_LINKS):
        if not target.is_symlink() or _names_descriptor(target):
            return target
        if target.lstat().st_uid not in (os.geteuid(), 0):
            raise OSError(
                errno.EACCES, "is a link of another user; name the file that it leads to", str(path)
            )
        target = target.parent / target.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _names_descriptor(path: Path) -> bool:
    """Return whether a path, such as /proc/self/fd/1, to which /dev/stdout leads, is an open file of a process."""
    return path.parent.resolve().match("/proc/*/fd")


def is_stream(target: Path) -> bool:
    """Return whether a path is a device, a pipe or an open file, which is written to and never replaced."""
    return target.exists() and (not target.is_file() or _names_descriptor(target))


@contextmanager
def open_replacement(
    path: Path, *, is_private: bool = False, follows_links: bool = True
) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends, whole and durable.

    If the block raises, `path` is unchanged and nothing else is left. A file that is replaced keeps its mode, and a new
    one gets that of any new file; with `is_private` only this user can read it. Where `path` is a link of this user or
    of root, the file that it leads to is replaced. A device, a pipe or an open file such as /dev/stdout is written to.
    A server sets `follows_links` to False: then whatever is at `path` is replaced.
    """
    target = find_target(path) if follows_links else path
    try:
        with (
            _open_stream(target)
            if follows_links and is_stream(target)
            else _open_draft(target, is_private) as file
        ):
            yield file
    except OSError as error:
        # A write does not know the name of its file, and users do not know the draft.
        if error.errno is not None and (error.filename is None or DRAFT in str(error.filename)):
            error.filename = str(path)
        raise


def _open_stream(target: Path) -> BinaryIO:
    if target.parent.resolve() == Path(f"/proc/{os.getpid()}/fd"):
        return open(int(target.name), "wb", closefd=False)
    return target.open("ab")


@contextmanager
def _open_draft(target: Path, is_private: bool) -> Iterator[BinaryIO]:
    mode = 0o600 if is_private else None
    if not is_private and target.exists():
        target.open("ab").close()  # a rename would replace a file that its user has made read-only
        mode = stat.S_IMODE(target.stat().st_mode)
    # In the same folder, since only a rename within one file system is atomic; "x" follows no link.
    draft = target.with_name(f"{DRAFT}{secrets.token_hex(8)}.part")
    try:
        with open(draft, "xb", opener=partial(os.open, mode=0o666 if mode is None else mode)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


FORMAT_OF_SUFFIX: Final = by_suffix(OUTPUT_FORMATS.values())

Fetch = Callable[[Path, str], object]


def choose_format(path: Path, given: str | None = None) -> str:
    """Return the given format, or that of the file's suffix, or NDJSON for stdout. Raise InvalidOption."""
    if given is not None:
        return given
    if path == STDOUT:
        return "ndjson"
    try:
        return FORMAT_OF_SUFFIX[path.suffix.lower()]
    except KeyError:
        raise InvalidOption(
            f"Cannot tell the format of {path.name} from its name: use {describe_outputs()}, or set --format."
        ) from None


def keys_path(matrix: Path) -> Path:
    """Return the path of the file with a matrix's keys: `vectors.npy.keys.txt` for `vectors.npy`."""
    return matrix.with_name(matrix.name + ".keys.txt")


def check_vectors(
    path: Path, format: str, more: Iterable[Path | None] = (), inputs: Iterable[Path] = ()
) -> None:
    """Raise InvalidOption if `write_vectors` could not write to `path`, or `check_outputs` refuses it and `more`."""
    keys = [keys_path(path)] if format == "npy" else []
    check_outputs([path, *filter(None, more), *keys], inputs)
    if keys and is_stream(find_target(path)):
        raise InvalidOption(f"npy cannot be written to {path}, because its keys need a second file.")


def check_outputs(outputs: Iterable[Path], inputs: Iterable[Path] = ()) -> None:
    """Raise InvalidOption if a file cannot be written, is named twice, or is an input or lies in a folder that is one.

    Call it before work that may take hours.
    """
    outputs = list(outputs)
    for path in outputs:
        _check_output(path)
    for first, second in combinations(outputs, 2):
        if _is_same(first, second):
            raise InvalidOption(f"{first} and {second} are the same file; name another.")
    for path in outputs:
        for source in inputs:
            if _is_same(path, source):
                raise InvalidOption(f"{path} is the file that is read, {source}; name another.")
            if source.is_dir() and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(source)):
                raise InvalidOption(
                    f"{path} lies in the folder that is read, {source}; name a file elsewhere."
                )


def _check_output(path: Path) -> None:
    target = find_target(path)
    if target.is_dir():
        raise InvalidOption(f"{path} is a directory; specify a file.")
    if not target.parent.is_dir():
        raise InvalidOption(
            f"The directory {target.parent} of {target.name} does not exist; create it first."
        )
    if is_stream(target):
        return
    try:
        if target.exists():
            target.open("ab").close()
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InvalidOption(f"{path} cannot be written: {error.strerror}.") from error


def _is_same(path: Path, other: Path) -> bool:
    """Return whether two paths are one file, or one pipe, by whatever links; devices may be named twice."""
    if not (path.exists() and other.exists()):
        return os.path.realpath(path) == os.path.realpath(other)
    return path.samefile(other) and not path.is_char_device()


def write_vectors(fetch: Fetch, path: Path, format: str) -> None:
    """Write vectors to `path` with `fetch(path, format)`; the file appears complete or not at all.

    Parquet and NDJSON are the bytes that the API sends. For npy, Parquet is fetched and converted to a matrix and a
    file of keys (`OUT.keys.txt`): the API's npy has no keys, and two requests could return different states.
    """
    if format != "npy":
        fetch(path, format)
        return
    from vectormill.files.matrices import write_matrix  # imported here, since it takes a fifth of a second

    with tempfile.TemporaryDirectory(prefix=DRAFT, dir=find_target(path).parent) as folder:
        rows = Path(folder, "rows.parquet")
        fetch(rows, "parquet")
        # The keys are moved into place first, so that no matrix exists without its keys.
        with open_replacement(path) as matrix, open_replacement(keys_path(path)) as keys:
            write_matrix(rows, matrix, keys)
