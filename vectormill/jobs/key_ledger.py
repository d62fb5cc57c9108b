"""KeyLedger: a duplicate-key detector that finds two equal keys among millions in bounded memory."""

import hashlib
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_BLOCK_KEYS = 1 << 16
# The number of keys that are sorted at a time: 16 bytes each, 16 MiB.
_SHARE_KEYS = 1 << 20
_ROW = np.dtype([("hash", np.uint64), ("position", np.int64)])


class KeyLedger:
    """A detector of duplicate keys, which keeps a hash of 8 bytes for each key.

    Beyond 65,536 keys the hashes are spilled to a temporary file. Two different keys among ten million have
    equal hashes with probability 3e-6; such a job would be refused wrongly.
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
            self._file.write(self._block.tobytes())
            self._block = array("Q")

    def find_duplicate(self) -> tuple[int, int] | None:
        """Return the positions of two equal keys, or None.

        One share of the hash space is searched at a time.
        """
        for hashes, positions in self._shares():
            order = np.argsort(hashes, kind="stable")
            equal = np.flatnonzero(np.diff(hashes[order]) == 0)
            if len(equal):
                return int(positions[order[equal[0]]]), int(positions[order[equal[0] + 1]])
        return None

    def find_repeated(self) -> npt.NDArray[np.int64]:
        """Return in order the positions of all keys that are equal to an earlier key, as int64."""
        found = [np.zeros(0, dtype=np.int64)]
        for hashes, positions in self._shares():
            order = np.argsort(hashes, kind="stable")
            equal = np.flatnonzero(np.diff(hashes[order]) == 0)
            found.append(positions[order[equal + 1]])
        return np.sort(np.concatenate(found))

    def _shares(self) -> Iterator[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]]:
        """Yield, for each share of the hash space, the hashes and the positions of their keys in order.

        Many keys are first sorted by share into a second file, one run at a time, so that each key is read
        twice in all.
        """
        num_shares = -(-self._num_keys // _SHARE_KEYS)
        if num_shares <= 1:
            hashes = np.concatenate([block for _, block in self._blocks()])
            yield hashes, np.arange(len(hashes))
            return
        width = np.uint64(2**64 // num_shares + 1)
        with tempfile.TemporaryFile(prefix="vectormill-keys-") as sorted_keys:
            runs: list[
                npt.NDArray[np.int64]
            ] = []  # row offsets in the file at which the shares of each run begin, and the end
            for start, hashes in self._runs():
                shares = hashes // width
                order = np.argsort(shares, kind="stable")
                begin = sorted_keys.tell() // _ROW.itemsize
                runs.append(
                    begin + np.searchsorted(shares[order], np.arange(num_shares + 1, dtype=np.uint64))
                )
                rows = np.empty(len(hashes), dtype=_ROW)
                rows["hash"], rows["position"] = hashes[order], order + start
                sorted_keys.write(rows.tobytes())
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


def _read_rows(file: BinaryIO, begin: int, end: int) -> npt.NDArray[np.void]:
    """Read the rows of a sorted file from `begin` up to, but not including, `end`."""
    file.seek(begin * _ROW.itemsize)
    return np.frombuffer(file.read((end - begin) * _ROW.itemsize), dtype=_ROW)
