"""Ragged arrays: rows of different lengths in one array, used as input and output of models.

Token ids are rows of int32, vectors are rows of float32 of equal length, and records are rows of bytes. All
operations are vectorised with NumPy and loop over no rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths in one array: row i is `values[offsets[i]:offsets[i + 1]]`.

    The rows follow one another without gaps, beginning at `offsets[0]`.
    """

    values: Values  # [total] of any type
    offsets: NDArray[np.int64]  # [n + 1], ascending

    @classmethod
    def from_lengths(cls, values: Values, lengths: "NDArray[Any]") -> "Ragged":
        """Return rows with these lengths over `values` [total], which they cover completely."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[Values], dtype: "np.dtype[Any] | type[Any]") -> "Ragged":
        """Copy rows into one array of type `dtype`, which also holds if there are no rows."""
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        return cls.from_lengths(
            np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype, copy=False), lengths
        )

    @classmethod
    def from_matrix(cls, matrix: Values) -> "Ragged":
        """Return the rows of `matrix` [n, width]; a view if the matrix is contiguous."""
        num_rows, width = matrix.shape
        return cls(matrix.reshape(-1), np.arange(num_rows + 1, dtype=np.int64) * width)

    @classmethod
    def from_scalars(cls, values: Values) -> "Ragged":
        """Return rows of one value each."""
        return cls(values, np.arange(len(values) + 1, dtype=np.int64))

    @classmethod
    def join(cls, parts: "Sequence[Ragged]") -> "Ragged":
        """Concatenate the rows of one or more parts in order; a copy unless there is only one part."""
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([part.lengths for part in parts])
        return cls.from_lengths(np.concatenate([part.covered for part in parts]), lengths)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the two arrays alone.

        The default for dataclasses with slots would take longer than a small batch.
        """
        return Ragged, (self.values, self.offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def covered(self) -> Values:
        """Return a view of the values that belong to rows."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    @property
    def matrix(self) -> Values:
        """Return a view [n, width] of rows of equal length. Raise ValueError if the lengths differ."""
        lengths = self.lengths
        width = int(lengths[0]) if len(lengths) else 0
        if not (lengths == width).all():
            raise ValueError("rows of different lengths do not form a matrix")
        return self.covered.reshape(len(self), width)

    def row(self, index: int) -> Values:
        """Return a view of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def part(self, start: int, end: int) -> "Ragged":
        """Return a view of the rows from `start` up to `end`."""
        return Ragged(self.values, self.offsets[start : end + 1])

    def take(self, rows: NDArray[np.int64]) -> "Ragged":
        """Copy the rows with these indices, in this order; an index may occur repeatedly."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        ends = np.cumsum(lengths)
        # For every value, the difference between its row's start in the source and in the copy.
        shifts = np.repeat(starts - (ends - lengths), lengths)
        return Ragged.from_lengths(self.values[shifts + np.arange(len(shifts))], lengths)
