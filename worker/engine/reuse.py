"""VectorReuse: the vectors computed last, by what they were computed of. Knows no texts.

A sequence is known by a digest of its tokens, so two texts that a tokenizer makes equal are one sequence. Vectors are
those of one model, as the encoder gives them: not cut, not normalized. Taking one over changes nothing, because no
vector depends on its batch. Threads meet here.

A cache as a processor has it: the digest names the *set* in which a vector may lie, and of a set the entry goes that
was not used for longest. All is in arrays made once; no step is taken a sequence.
"""

import secrets
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged

# Two numbers of 64 bits.
Digests = NDArray[np.uint64]  # [n, 2]
Vectors = NDArray[np.float32]  # [n, dim]

WAYS: Final = 8  # entries of a set: with as many, hardly anything goes before its time
ENTRY_BYTES: Final = 24  # of an entry besides its vector: the digest, and when it was used
# Digested at once: more would leave the processor's cache, and take memory that grows with a chunk.
BLOCK_TOKENS: Final = 1 << 15

# The finalizer of SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


class VectorReuse:
    """Keeps vectors in at most so many bytes. 0 bytes: reuses nothing.

    Digests are made with keys of this very object, drawn by chance, and hold nowhere else.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._keys = np.array([secrets.randbits(64), secrets.randbits(64)], dtype=np.uint64)
        self._lock = threading.Lock()
        self._now = 0
        # Made with the first vectors, whose size it needs. Entry e lies in set e // ways.
        self._digests = np.zeros((0, 2), dtype=np.uint64)  # [entries, 2]
        self._used_at = np.zeros(0, dtype=np.int64)  # [entries], 0: there is nothing
        self._vectors = np.zeros((0, 0), dtype=np.float32)  # [entries, dim]
        self._num_ways = 1

    @property
    def num_bytes(self) -> int:
        return self._digests.nbytes + self._used_at.nbytes + self._vectors.nbytes

    def digest(self, inputs: Mapping[str, Ragged], rows: NDArray[np.int64], prompt_length: int) -> Digests:
        """Return a digest of each of these rows of a model's inputs and of the number of its tokens that are not pooled
        over; nothing at all if nothing is kept.

        A digest is, twice, the sum over the tokens of a number of 64 bits that is mixed of value, place, input and a
        key. Two sequences differ in at least one summand, so that among 10^12 different ones the chance of one
        collision is 1 to 10^14, as long as nobody knows the keys.
        """
        if not self._max_bytes:
            return np.zeros((0, 2), dtype=np.uint64)
        sums = np.empty((len(next(iter(inputs.values()))), 2), dtype=np.uint64)
        sums[:] = _mix(np.uint64(prompt_length) ^ ~self._keys)
        for number, name in enumerate(sorted(inputs)):
            for start, end in _cut_blocks(inputs[name].offsets):
                self._add_digests(sums[start:end], inputs[name].part(start, end), number)
        return sums[rows]

    def _add_digests(self, sums: Digests, rows: Ragged, number: int) -> None:
        """Add to the sums what the rows of the input of this number contribute."""
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
        """Return which digests have a vector here, and a copy of these vectors."""
        with self._lock:
            rows, entries = self._look_up(digests)
            self._touch(entries)
            return rows, self._vectors[entries]

    def keep(self, digests: Digests, vectors: Vectors, rows: NDArray[np.int64]) -> None:
        """Copy the vectors in these rows (ascending) of [m, dim], replacing the least recently used."""
        with self._lock:
            if not len(digests) or not self._make_room(vectors.shape[1]):
                return
            is_new = np.zeros(len(digests), dtype=np.bool_)
            is_new[np.unique(digests[:, 0], return_index=True)[1]] = True  # each of them once
            is_new[self._look_up(digests)[0]] = False
            new = np.flatnonzero(is_new)
            sets = self._find_sets(digests[new])
            # When several come into one set, the last ones are kept, each in a way of its own.
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
            # Mostly it is all of them, and copying them twice is most of the work.
            self._vectors[entries] = vectors if len(new) == len(vectors) else vectors[rows[new]]
            self._touch(entries)

    def _look_up(self, digests: Digests) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that are cached, and their entries."""
        if not len(self._digests):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        entries = self._find_sets(digests)[:, np.newaxis] * self._num_ways + np.arange(self._num_ways)
        is_equal = self._digests[entries, 0] == digests[:, :1]
        rows, ways = np.nonzero(is_equal)  # by their first half: hardly one too many
        found = entries[rows, ways]
        is_it = (self._digests[found, 1] == digests[rows, 1]) & (self._used_at[found] > 0)
        return rows[is_it], found[is_it]

    def _find_sets(self, digests: Digests) -> NDArray[np.int64]:
        return (digests[:, 0] % np.uint64(len(self._digests) // self._num_ways)).astype(np.int64)

    def _touch(self, entries: NDArray[np.int64]) -> None:
        self._now += 1
        self._used_at[entries] = self._now

    def _make_room(self, dimension: int) -> bool:
        """Allocate the arrays if needed. Return False if not a single vector fits."""
        num_entries = self._max_bytes // (4 * dimension + ENTRY_BYTES)
        if not len(self._digests) and num_entries:
            self._num_ways = min(WAYS, num_entries)
            num_entries -= num_entries % self._num_ways
            self._digests = np.zeros((num_entries, 2), dtype=np.uint64)
            self._used_at = np.zeros(num_entries, dtype=np.int64)
            # The system gives its pages when they are written, so that it takes what was kept and no more.
            self._vectors = np.zeros((num_entries, dimension), dtype=np.float32)
        return num_entries > 0


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each word, in place."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        words ^= words >> shift
        words *= factor
    words ^= words >> _SHIFTS[2]
    return words


def _cut_blocks(offsets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with about BLOCK_TOKENS tokens; a longer row is alone."""
    ends = np.arange(offsets[0] + BLOCK_TOKENS, offsets[-1], BLOCK_TOKENS)
    cuts = np.unique(np.concatenate(([0], np.searchsorted(offsets, ends), [len(offsets) - 1])))
    yield from pairwise(cuts.tolist())
