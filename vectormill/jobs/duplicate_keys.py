"""DuplicateFinder: finds two equal keys among millions in bounded memory."""

import errno
import hashlib
import io
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from vectormill.domain.errors import DiskFull

_BLOCK_KEYS = 1 << 16
# The number of keys that are sorted at a time: 16 bytes each, 16 MiB.
_SHARE_KEYS = 1 << 20
_ROW = np.dtype([("hash", np.uint64), ("position", np.int64)])
# The most bytes of a key on disk: its hash in the order of keys, then hash and position in sorted runs.
BYTES_PER_KEY: Final = 8 + _ROW.itemsize

_Rows = tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]


class DuplicateFinder:
    """A detector of duplicate keys, which keeps a hash of 8 bytes for each key.

    Beyond 65,536 keys the hashes are spilled to a temporary file. Two different keys among ten million have
    equal hashes with probability 3e-6, among a billion with 2.7 %; a caller that can look up keys by their
    positions tells such keys apart.
    """

    def __init__(self) -> None:
        self._block = array("Q")
        self._file: BinaryIO | None = None
        self._num_keys = 0

    def add(self, key: bytes) -> None:
        self._block.append(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()))
        self._num_keys += 1
        self._spill()

    def add_all(self, keys: Sequence[str]) -> None:
        """Add many keys, at a tenth of the time of `add`. The two must not be mixed in one ledger.

        Keys are hashed with Python's own 64-bit hash.
        """
        hashes = np.fromiter(map(hash, keys), dtype=np.int64, count=len(keys))
        self._block.frombytes(hashes.tobytes())
        self._num_keys += len(keys)
        self._spill()

    def _spill(self) -> None:
        if len(self._block) >= _BLOCK_KEYS:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="vectormill-keys-")  # noqa: SIM115 - lives as long as self
            _write(self._file, self._block.tobytes())
            self._block = array("Q")

    def find_duplicate(
        self,
        read_key: Callable[[int], str | None] = lambda _: None,
        check: Callable[[], object] = lambda: None,
    ) -> tuple[int, int] | None:
        """Return the positions of the first key that an earlier one equals, the earlier one first, or None.

        `read_key` returns the key at a position, and is called only for keys with equal hashes; without it such
        keys are taken for equal. `check` is called about twice for every million keys. Memory is bounded, however
        often a key occurs: behind the first run with a duplicate none is looked for.
        """
        first: tuple[int, int] | None = None

        def is_unique(rows: _Rows) -> bool:
            nonlocal first
            check()
            first = _find_first(rows, read_key, first)
            return first is None

        for rows in self._shares(is_unique):
            is_unique(rows)
        return first

    def find_repeated(self) -> npt.NDArray[np.int64]:
        """Return in order the positions of all keys that are equal to an earlier key, as int64."""
        found = [np.zeros(0, dtype=np.int64)]
        for hashes, positions in self._shares():
            order = np.argsort(hashes, kind="stable")
            equal = np.flatnonzero(np.diff(hashes[order]) == 0)
            found.append(positions[order[equal + 1]])
        return np.sort(np.concatenate(found))

    def _shares(self, takes_more: Callable[[_Rows], bool] = lambda _: True) -> Iterator[_Rows]:
        """Yield, for each share of the hash space, the hashes and the positions of their keys in order.

        Many keys are first sorted into runs in a second file, so that each key is read twice in all. No run is
        taken after one for which `takes_more` returns False.
        """
        num_shares = -(-self._num_keys // _SHARE_KEYS)
        if num_shares <= 1:
            hashes = np.concatenate([block for _, block in self._blocks()])
            yield hashes, np.arange(len(hashes))
            return
        borders = np.arange(1, num_shares, dtype=np.uint64) * np.uint64(2**64 // num_shares + 1)
        with tempfile.TemporaryFile(prefix="vectormill-keys-") as sorted_keys:
            runs: list[
                npt.NDArray[np.int64]
            ] = []  # row offsets in the file at which the shares of each run begin, and the end
            for start, hashes in self._runs():
                order = np.argsort(hashes, kind="stable")
                begin = sorted_keys.tell() // _ROW.itemsize
                rows = np.empty(len(hashes), dtype=_ROW)
                hashes, positions = hashes[order], order + start
                rows["hash"], rows["position"] = hashes, positions
                runs.append(begin + np.concatenate(([0], np.searchsorted(hashes, borders), [len(rows)])))
                _write(sorted_keys, rows.tobytes())
                if not takes_more((hashes, positions)):
                    break
            for share in range(num_shares):
                parts = [_read_rows(sorted_keys, int(run[share]), int(run[share + 1])) for run in runs]
                rows = np.concatenate(parts)
                yield rows["hash"], rows["position"]

    def _runs(self) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Yield runs of about `_SHARE_KEYS` hashes, each with the position of its first key."""
        blocks: list[npt.NDArray[np.uint64]] = []
        first = num_keys = 0
        for _, block in self._blocks():
            blocks.append(block)
            num_keys += len(block)
            if num_keys >= _SHARE_KEYS:
                yield first, np.concatenate(blocks)
                blocks, first, num_keys = [], first + num_keys, 0
        if num_keys:
            yield first, np.concatenate(blocks)

    def _blocks(self) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Yield blocks of hashes, from the file and then from memory, with the position of the first key."""
        start = 0
        if self._file is not None:
            self._file.seek(0)
            while data := self._file.read(8 * _BLOCK_KEYS):
                block = np.frombuffer(data, dtype=np.uint64)
                yield start, block
                start += len(block)
        yield start, np.frombuffer(self._block.tobytes(), dtype=np.uint64)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _find_first(
    rows: _Rows, read_key: Callable[[int], str | None], before: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the positions of the first key that an earlier one equals, or `before` unless it is earlier still.

    Rows of equal hashes are in the order of their positions.
    """
    order = np.argsort(rows[0], kind="stable")
    hashes, positions = rows[0][order], rows[1][order]
    again = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
    for place in again[np.argsort(positions[again])].tolist():
        position = int(positions[place])
        if before is not None and position >= before[1]:
            break
        key = read_key(position)
        for earlier in positions[np.searchsorted(hashes, hashes[place]) : place].tolist():
            if read_key(earlier) == key:
                return earlier, position
    return before


def refuse_full_disk(num_keys: int) -> int:
    """Return the bytes of disk that so many keys take at most. Raise DiskFull if fewer are free."""
    num_bytes, folder = num_keys * BYTES_PER_KEY, tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskFull(
            f"Looking for duplicates among {num_keys:,} keys takes {num_bytes:,} bytes in {folder}, where {free:,} "
            "are free; make room, or set TMPDIR to another folder."
        )
    return num_bytes


def _write(file: BinaryIO, content: bytes) -> None:
    """Write at the end of a temporary file. Raise DiskFull if there is no room for it."""
    try:
        file.seek(0, io.SEEK_END)
        file.write(content)
        file.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"No room is left in {tempfile.gettempdir()} for keys that are compared.") from error


def _read_rows(file: BinaryIO, begin: int, end: int) -> npt.NDArray[np.void]:
    """Read the rows of a sorted file from `begin` up to, but not including, `end`."""
    file.seek(begin * _ROW.itemsize)
    return np.frombuffer(file.read((end - begin) * _ROW.itemsize), dtype=_ROW)
