"""WordTable: words and their token ids, which are looked up for many words at once. Knows nothing of tokenizers."""

import threading
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged

UNKNOWN: Final = -1
FIRST_CAPACITY: Final = 1 << 12


class WordTable:
    """Only ever grows, so a number stays its word's. Readers take no lock: a word's number is told after its ids lie.

    The first numbers are those of `rows`, which are no word's.
    """

    def __init__(self, rows: Ragged) -> None:
        self._numbers: dict[str, int] = {}
        self._values: NDArray[np.int32] = np.zeros(FIRST_CAPACITY, dtype=np.int32)
        self._offsets: NDArray[np.int64] = np.zeros(FIRST_CAPACITY, dtype=np.int64)
        self._num_rows = 0
        self.num_chars = 0  # of all words together
        self._lock = threading.Lock()
        self._append(rows)

    def __len__(self) -> int:
        return self._num_rows

    def find(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of each word [words], UNKNOWN for new ones. Takes no Python step for each word."""
        found = map(self._numbers.get, words, repeat(UNKNOWN))
        return np.fromiter(found, dtype=np.int64, count=len(words))

    def add(self, words: Iterable[str], ids: Ragged) -> None:
        """Add words; row i of `ids` belongs to word i. Known words are skipped."""
        with self._lock:
            new = [(word, row) for row, word in enumerate(words) if word not in self._numbers]
            rows = ids.take(np.array([row for _, row in new], dtype=np.int64))
            first = self._append(rows)
            self.num_chars += sum(len(word) for word, _ in new)
            self._numbers.update(zip((word for word, _ in new), range(first, self._num_rows), strict=True))

    def take(self, numbers: NDArray[np.int64]) -> Ragged:
        """Return the ids of these words, one row a word."""
        # The offsets first: values that they point to are in whatever array lies there afterwards.
        offsets = self._offsets
        return Ragged(self._values, offsets).take(numbers)

    def _append(self, rows: Ragged) -> int:
        """Append rows and return the number of the first."""
        start, end = self._num_rows, self._num_rows + len(rows)
        num_values = int(self._offsets[start])
        self._offsets = _grown(self._offsets, end + 1)
        self._values = _grown(self._values, num_values + len(rows.values))
        self._values[num_values : num_values + len(rows.values)] = rows.values
        self._offsets[start : end + 1] = num_values + rows.offsets
        self._num_rows = end
        return start


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the array, or a copy of twice the size or more. Never resized, since a reader may look at it."""
    if size <= len(array):
        return array
    grown = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
