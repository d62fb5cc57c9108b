"""WordTable: a model's word embeddings in a file, of which the rows of a batch are read. Knows no framework."""

import os
import weakref
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

BYTES_PER_NUMBER: Final = 4


class WordTable:
    """The rows [vocabulary size, dim] fp32 of a file that holds nothing else.

    They are read by number and not mapped: with every row a mapping brings in what lies around it, 64 KiB on Linux, and
    soon has all of a table that is half of a small model and most of a multilingual one. Reading takes some 2 µs a row,
    of which a batch of 1,024 tokens has 300.
    """

    def __init__(self, path: Path, dim: int) -> None:
        self.num_bytes = path.stat().st_size
        self._dim = dim
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, input_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """[*input_ids.shape, dim], of at least one id. Raises IndexError for one that the vocabulary does not have."""
        words, places = np.unique(input_ids, return_inverse=True)
        row_bytes = self._dim * BYTES_PER_NUMBER
        num_words = self.num_bytes // row_bytes
        for word in (words[0], words[-1]):  # the least and the greatest
            if not 0 <= word < num_words:
                raise IndexError(f"a vocabulary of {num_words} words has no id {word}")
        rows = b"".join([os.pread(self._file, row_bytes, word * row_bytes) for word in words.tolist()])
        table = np.frombuffer(rows, dtype=np.float32).reshape(len(words), self._dim)
        embeddings: NDArray[np.float32] = table[places]
        return embeddings
