"""VectorReuse caches the most recent vectors under digests of the tokens that they were computed from.

It knows nothing about texts: two texts with the same tokens are the same sequence. The vectors are those of
one model, as the encoder returns them, neither cut nor normalized. Reusing a vector changes no result,
because no vector depends on its batch. The cache is thread-safe.

It is a set-associative cache like a processor's: the digest selects the *set* in which a vector may be
stored, and the least recently used entry of the set is replaced. All data is in arrays that are allocated
once, and no Python step is taken for each sequence.
"""

import secrets
import threading
from collections.abc import Mapping
from hashlib import blake2b
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged

# A digest is two numbers of 64 bits.
Digests = NDArray[np.uint64]  # [n, 2]
Vectors = NDArray[np.float32]  # [n, dim]

WAYS: Final = 8  # entries of a set: with this many, hardly any entry is replaced too early
ENTRY_BYTES: Final = 24  # bytes of an entry without its vector: the digest and the time of its last use
# Tokens digested at once. More would not fit the processor's cache, and would take memory that grows with a
# chunk.
BLOCK_TOKENS: Final = 1 << 15

# The finalizer of SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


class VectorReuse:
    """Caches vectors in at most `max_bytes`; with 0 nothing is cached.

    Digests use random keys of this object, so they are valid for this object only.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._keys = np.array([secrets.randbits(64), secrets.randbits(64)], dtype=np.uint64)
        self._lock = threading.Lock()
        self._now = 0
        # The arrays are allocated with the first vectors, since their size is needed. Entry e belongs to set
        # e // ways.
        self._digests = np.zeros((0, 2), dtype=np.uint64)  # [entries, 2]
        self._used_at = np.zeros(0, dtype=np.int64)  # [entries]; 0 marks an empty entry
        self._vectors = np.zeros((0, 0), dtype=np.float32)  # [entries, dim]
        self._num_ways = 1

    @property
    def num_bytes(self) -> int:
        return self._digests.nbytes + self._used_at.nbytes + self._vectors.nbytes

    def digest(
        self, inputs: Mapping[str, Ragged], rows: NDArray[np.int64], constants: Mapping[str, int]
    ) -> Digests:
        """Return the digests [rows, 2] of these rows of a model's inputs; an empty array if the cache is off.

        A digest covers a row's tokens and the inputs that are the same for all rows, `constants`, of which 0 is
        the default. It is, twice, the sum over the tokens of a number of 64 bits that mixes value, position,
        input and a key. Two different sequences differ in at least one summand, so that among 10^12 of them
        the chance of one collision is 1 in 10^14, as long as nobody knows the keys.
        """
        if not self._max_bytes:
            return np.zeros((0, 2), dtype=np.uint64)
        sums = np.empty((len(next(iter(inputs.values()))), 2), dtype=np.uint64)
        given = repr(sorted((name, value) for name, value in constants.items() if value))
        mark = int.from_bytes(blake2b(given.encode(), digest_size=8).digest())
        sums[:] = _mix(np.uint64(mark) ^ ~self._keys)
        for number, name in enumerate(sorted(inputs)):
            # Ranges of rows with about BLOCK_TOKENS tokens each; a longer row is a separate range.
            offsets = inputs[name].offsets
            ends = np.arange(offsets[0] + BLOCK_TOKENS, offsets[-1], BLOCK_TOKENS)
            cuts = np.unique(np.concatenate(([0], np.searchsorted(offsets, ends), [len(offsets) - 1])))
            for start, end in pairwise(cuts.tolist()):
                self._add_digests(sums[start:end], inputs[name].part(start, end), number)
        return sums[rows]

    def _add_digests(self, sums: Digests, rows: Ragged, number: int) -> None:
        """Add the contribution of one of the model's inputs to the digests; `number` identifies the input."""
        lengths, values = rows.lengths, rows.covered
        filled = np.flatnonzero(lengths)
        if not len(filled):
            return
        starts = rows.offsets[filled] - rows.offsets[0]
        places = np.arange(len(values)) - np.repeat(starts, lengths[filled])
        words = values.astype(np.uint32).astype(np.uint64)
        words |= (places + (number << 26)).astype(np.uint64) << np.uint64(32)
        for column, key in enumerate(self._keys):
            sums[filled, column] += np.add.reduceat(_mix(words ^ key), starts)

    def find(self, digests: Digests) -> tuple[NDArray[np.int64], Vectors]:
        """Return the indices of the digests that have a cached vector, and a copy of these vectors."""
        with self._lock:
            rows, entries = self._look_up(digests)
            self._touch(entries)
            return rows, self._vectors[entries]

    def keep(self, digests: Digests, vectors: Vectors, rows: NDArray[np.int64]) -> None:
        """Store vectors[rows] (rows ascending) under the digests. Replace the least recently used."""
        with self._lock:
            if not len(digests) or not self._make_room(vectors.shape[1]):
                return
            is_new = np.zeros(len(digests), dtype=np.bool_)
            is_new[np.unique(digests[:, 0], return_index=True)[1]] = True  # the first of equal digests
            is_new[self._look_up(digests)[0]] = False
            new = np.flatnonzero(is_new)
            sets = self._find_sets(digests[new])
            # When several new digests belong to one set, the last ones are stored, each in a separate
            # entry.
            order = np.argsort(sets, kind="stable")[::-1]
            new, sets = new[order], sets[order]
            first = np.flatnonzero(np.diff(sets, prepend=-1))
            places = np.arange(len(sets)) - np.repeat(first, np.diff(first, append=len(sets)))
            fitting = places < self._num_ways
            new, sets, places = new[fitting], sets[fitting], places[fitting]
            used_at = self._used_at.reshape(-1, self._num_ways)[sets]
            ways = np.argsort(used_at, axis=1, kind="stable")[np.arange(len(sets)), places]
            entries = sets * self._num_ways + ways
            in_order = np.argsort(new)
            new, entries = new[in_order], entries[in_order]
            self._digests[entries] = digests[new]
            # Mostly all vectors are stored, and taking the rows would copy them twice, which is most of the
            # work.
            self._vectors[entries] = vectors if len(new) == len(vectors) else vectors[rows[new]]
            self._touch(entries)

    def _look_up(self, digests: Digests) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of the digests that are cached, and their entries."""
        if not len(self._digests):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        entries = self._find_sets(digests)[:, np.newaxis] * self._num_ways + np.arange(self._num_ways)
        is_equal = self._digests[entries, 0] == digests[:, :1]
        rows, ways = np.nonzero(is_equal)  # compares the first half only, which is rarely equal by chance
        found = entries[rows, ways]
        is_it = (self._digests[found, 1] == digests[rows, 1]) & (self._used_at[found] > 0)
        return rows[is_it], found[is_it]

    def _find_sets(self, digests: Digests) -> NDArray[np.int64]:
        return (digests[:, 0] % np.uint64(len(self._digests) // self._num_ways)).astype(np.int64)

    def _touch(self, entries: NDArray[np.int64]) -> None:
        self._now += 1
        self._used_at[entries] = self._now

    def _make_room(self, dimension: int) -> bool:
        """Allocate the arrays if needed. Return False if not even one vector fits."""
        num_entries = self._max_bytes // (4 * dimension + ENTRY_BYTES)
        if not len(self._digests) and num_entries:
            self._num_ways = min(WAYS, num_entries)
            num_entries -= num_entries % self._num_ways
            self._digests = np.zeros((num_entries, 2), dtype=np.uint64)
            self._used_at = np.zeros(num_entries, dtype=np.int64)
            # The operating system allocates pages when they are written, so the cache takes only the memory
            # that it has filled.
            self._vectors = np.zeros((num_entries, dimension), dtype=np.float32)
        return num_entries > 0


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each word, in place."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        words ^= words >> shift
        words *= factor
    words ^= words >> _SHIFTS[2]
    return words
