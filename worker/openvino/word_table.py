"""Read the word embeddings of a batch from a file. Imports no framework."""

import os
import threading
import weakref
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

BYTES_PER_NUMBER: Final = 4
# The size of the cache of recently read rows: 2,700 rows of 384 numbers, which hold all but 50 of the 330
# distinct words in a batch of 1,024 tokens of English.
KEPT_BYTES: Final = 4 << 20
NOT_KEPT: Final = -1


class EmbeddingRows:
    """A table [vocabulary size, dim] of fp32 in a file that holds nothing else. Safe for threads.

    Rows are read with pread rather than memory-mapped: a mapping also loads the neighbours of each row, 64
    KiB on Linux, and soon the whole table, which is half of a small model and most of a multilingual one.
    Reading takes some 2 µs per row, so recent rows are cached. When the cache is full, rows are evicted that
    were not used since the marks of recent use were last cleared.
    """

    def __init__(self, path: Path, dim: int, kept_bytes: int = KEPT_BYTES) -> None:
        self.num_bytes = path.stat().st_size
        self.dim = dim
        self._row_bytes = dim * BYTES_PER_NUMBER
        self._num_words = self.num_bytes // self._row_bytes
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        num_kept = min(self._num_words, kept_bytes // self._row_bytes)
        self._kept = np.empty((num_kept, dim), dtype=np.float32)
        self._words = np.full(num_kept, NOT_KEPT, dtype=np.int64)  # the word whose row each cache slot holds
        self._places = np.full(self._num_words, NOT_KEPT, dtype=np.int32)  # the cache slot of each word
        self._is_recent = np.zeros(num_kept, dtype=np.bool_)
        self._lock = threading.Lock()

    def read(
        self, input_ids: NDArray[np.int64], out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Return the rows [*input_ids.shape, dim], in `out` if given. Raises IndexError for an unknown id."""
        ids = input_ids.reshape(-1)
        for word in (int(ids.min()), int(ids.max())):
            if not 0 <= word < self._num_words:
                raise IndexError(f"id {word} is outside the vocabulary of {self._num_words} words")
        if out is None:
            out = np.empty((*input_ids.shape, self.dim), dtype=np.float32)
        rows = out.reshape(len(ids), self.dim)
        with self._lock:
            if (places := self._find_places(ids)) is not None:
                # mode="clip" avoids a copy that the default check makes; all indices are in range.
                np.take(self._kept, places, axis=0, out=rows, mode="clip")
                return out
        words, numbers = np.unique(ids, return_inverse=True)
        np.take(self._read_rows(words), numbers, axis=0, out=rows, mode="clip")
        return out

    def _find_places(self, ids: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Return the cache slots of these words, reading missing rows; None if the cache is too small."""
        places = self._places[ids]
        is_missing = places < 0
        if not is_missing.any():
            self._is_recent[places] = True
            return places
        words = np.unique(ids[is_missing])
        wanted = places[~is_missing]
        self._is_recent[wanted] = True
        free = np.flatnonzero(~self._is_recent)[: len(words)]
        if len(free) < len(words):
            self._is_recent[:] = False
            self._is_recent[wanted] = True
            free = np.flatnonzero(~self._is_recent)[: len(words)]
            if len(free) < len(words):
                return None
        self._kept[free] = self._read_rows(words)
        leaving = self._words[free]
        self._places[leaving[leaving != NOT_KEPT]] = NOT_KEPT
        self._words[free], self._places[words] = words, free
        places = self._places[ids]
        self._is_recent[places] = True
        return places

    def _read_rows(self, words: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read the rows [len(words), dim] of these words from the file."""
        size = self._row_bytes
        rows = b"".join([os.pread(self._file, size, word * size) for word in words.tolist()])
        return np.frombuffer(rows, dtype=np.float32).reshape(len(words), self.dim)
