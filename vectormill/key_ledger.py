"""KeyLedger: finds two equal keys among millions in bounded memory. Knows nothing of jobs or databases."""

import hashlib
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

_BLOCK_KEYS = 1 << 16
# Keys sorted at a time: 16 bytes each, 16 MiB.
_SHARE_KEYS = 1 << 20


class KeyLedger:
    """A 64-bit hash of every key, 8 bytes a key, spilled to a temporary file beyond 65,536 keys.

    Two different keys out of ten million share a hash with probability 3e-6; such a job would be refused wrongly.
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
        """Many at once, at a tenth of the time: by Python's own 64-bit hash. For a ledger that `add` is not used on."""
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
        """The positions of two equal keys, or None. Works through one share of the hash space at a time."""
        num_shares = -(-self._num_keys // _SHARE_KEYS)
        for share in range(num_shares):
            duplicate = self._find_duplicate_in(share, num_shares)
            if duplicate is not None:
                return duplicate
        return None

    def find_repeated(self) -> npt.NDArray[np.int64]:
        """The positions of all keys that an earlier one equals, in order; 8 bytes each."""
        num_shares = -(-self._num_keys // _SHARE_KEYS)
        found = [np.zeros(0, dtype=np.int64)]
        for share in range(num_shares):
            hashes, positions = self._load_share(share, num_shares)
            order = np.argsort(hashes, kind="stable")
            equal = np.flatnonzero(np.diff(hashes[order]) == 0)
            found.append(positions[order[equal + 1]])
        return np.sort(np.concatenate(found))

    def _find_duplicate_in(self, share: int, num_shares: int) -> tuple[int, int] | None:
        all_hashes, all_positions = self._load_share(share, num_shares)
        order = np.argsort(all_hashes, kind="stable")
        equal = np.flatnonzero(np.diff(all_hashes[order]) == 0)
        if not len(equal):
            return None
        return int(all_positions[order[equal[0]]]), int(all_positions[order[equal[0] + 1]])

    def _load_share(
        self, share: int, num_shares: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """The hashes of a share of the hash space, and their keys' positions."""
        hashes: list[npt.NDArray[np.uint64]] = []
        positions: list[npt.NDArray[np.int64]] = []
        for start, block in self._blocks():
            chosen = np.flatnonzero(block % np.uint64(num_shares) == share)
            hashes.append(block[chosen])
            positions.append(chosen + start)
        return np.concatenate(hashes), np.concatenate(positions)

    def _blocks(self) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Pieces of the ledger with the position of their first key."""
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
