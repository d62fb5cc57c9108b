"""ResultRows: what comes back for the texts of one request, laid where each belongs. Knows no batch."""

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged


class ResultRows:
    """Filled as batches come back. What was never filled is zeros, or an empty row where rows have any length.

    `dimension` is that of the vectors; None where the model gives no vectors, but bytes, scores or weights of words:
    these are kept as they come, equally long or not. What comes does not decide it, or a row that happens to be as long
    as a vector would be taken for one.
    """

    def __init__(self, num_rows: int, dimension: int | None) -> None:
        self._num_rows = num_rows
        self._dimension = dimension
        self._vectors: NDArray[np.float32] | None = None
        self._parts: list[tuple[NDArray[np.int64], Ragged]] = []

    def put(self, rows: NDArray[np.int64], results: Ragged) -> None:
        """Copy the results of some rows."""
        if self._dimension is not None:
            self.put_vectors(rows, results.matrix)
        else:
            values = results.covered.copy()
            self._parts.append((rows, Ragged(values, results.offsets - results.offsets[0])))

    def put_vectors(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Copy vectors, float32 [n, dimension], into these rows."""
        found = self.vectors
        assert found is not None
        found[rows] = vectors

    @property
    def vectors(self) -> NDArray[np.float32] | None:
        """Return the vectors [n, dimension]; None if the results are not vectors."""
        if self._vectors is None and self._dimension is not None:
            self._vectors = np.zeros((self._num_rows, self._dimension), dtype=np.float32)
        return self._vectors

    def join(self) -> Ragged:
        """Return all rows in order. Rows without a result are empty unless the model gives vectors."""
        if self.vectors is not None:
            return Ragged.from_matrix(self.vectors)
        lengths = np.zeros(self._num_rows, dtype=np.int64)
        if not self._parts:
            return Ragged.from_lengths(np.zeros(0, np.uint8), lengths)
        rows = np.concatenate([rows for rows, _ in self._parts])
        joined = Ragged.join([part for _, part in self._parts])
        lengths[rows] = joined.lengths
        return Ragged.from_lengths(joined.take(np.argsort(rows, kind="stable")).values, lengths)
