"""The identity of a model: a digest of all bytes of its files. It parses nothing, so any process may compute it.

The digest of a large file is kept until its size, its times or its inode change, so that gigabytes are read once on a
machine. Whatever is wrong with what is kept only means that a file is read again.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

from vectormill.domain.errors import ModelError
from vectormill.files.outputs import open_replacement
from vectormill.models.weights import list_small_files, list_weight_files, list_weights

IDENTITY_DIGITS: Final = 16
# Pieces of one file are hashed at once, as hashing releases the interpreter's lock.
PIECE_BYTES: Final = 4 << 20
MOST_THREADS: Final = 8
# Smaller files are read as fast as what is kept of them.
LEAST_KEPT_BYTES: Final = 1 << 20
MOST_KEPT: Final = 1000
# A file that changes again within the resolution of its file system's times (2 s on FAT) looks unchanged.
SETTLED_SECONDS: Final = 2.0


def identify_directory(directory: Path, kept: Path | None = None) -> str:
    """Return sixteen hex digits that identify the content of a model's files on any machine.

    Digests of large files are kept in the folder `kept`. Raise ModelError if a file cannot be read.
    """
    files = {*list_small_files(directory), *directory.glob("*/*.json")}
    files |= set(list_weight_files(directory, list_weights(directory)))
    digest = sha256()
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for path in sorted(files):
            try:
                content = _digest_once(pool, path, kept)
            except OSError as error:
                raise ModelError(f"The file {path} cannot be read: {error}.") from error
            digest.update(path.relative_to(directory).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()[:IDENTITY_DIGITS]


def _digest_once(pool: ThreadPoolExecutor, path: Path, kept: Path | None) -> bytes:
    """Return the digest of a file, as it is kept or, after reading all of it, as it will be kept."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        place = None
        if kept is not None and found.st_size >= LEAST_KEPT_BYTES:
            place = kept / _name_state(found)
            with suppress(OSError, ValueError):
                if len(known := bytes.fromhex(place.read_text("ascii"))) == sha256().digest_size:
                    return known
        began = time.time()
        starts = range(0, found.st_size, PIECE_BYTES)
        digest_piece = partial(_digest_piece, file.fileno(), found.st_size)
        content = sha256(b"".join(pool.map(digest_piece, starts)))
        is_settled = max(found.st_mtime, found.st_ctime) < began - SETTLED_SECONDS
        if place is not None and is_settled and _name_state(os.fstat(file.fileno())) == place.name:
            _keep(place, content.hexdigest())
    return content.digest()


def _digest_piece(descriptor: int, size: int, start: int) -> bytes:
    piece = os.pread(descriptor, PIECE_BYTES, start)
    if len(piece) < min(PIECE_BYTES, size - start):
        raise OSError("it is cut while it is read")
    return sha256(piece).digest()


def _name_state(found: os.stat_result) -> str:
    """Return a name that is another one after each change of the file, or of the way in which it is hashed."""
    times = found.st_mtime_ns, found.st_ctime_ns
    return "-".join(map(str, (PIECE_BYTES, found.st_dev, found.st_ino, found.st_size, *times)))


def _keep(place: Path, digest: str) -> None:
    """Write a digest, if that is possible, and remove the oldest beyond MOST_KEPT."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with open_replacement(place, follows_links=False) as file:
            file.write(digest.encode())
        for path in sorted(place.parent.iterdir(), key=os.path.getmtime)[:-MOST_KEPT]:
            path.unlink()
