"""Ragged: rows of different lengths in one array. What goes into a model, a row a sequence, and what comes out of it.

Token ids are rows of int32, vectors rows of float32 that are all equally long, records rows of bytes. No step here is
taken a row: whoever holds many rows touches them with NumPy alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Row i is `values[offsets[i]:offsets[i + 1]]`; the rows follow one another without gaps, from `offsets[0]` on."""

    values: Values  # [total] of any type
    offsets: NDArray[np.int64]  # [n + 1], ascending

    @classmethod
    def from_lengths(cls, values: Values, lengths: "NDArray[Any]") -> "Ragged":
        """Return rows of these lengths, which cover `values` [total]."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[Values], dtype: "np.dtype[Any] | type[Any]") -> "Ragged":
        """Copy the rows; their type is `dtype`, also when there are none."""
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        return cls.from_lengths(
            np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype, copy=False), lengths
        )

    @classmethod
    def from_matrix(cls, matrix: Values) -> "Ragged":
        """Return the rows of `matrix` [n, width]; a view where that is contiguous."""
        num_rows, width = matrix.shape
        return cls(matrix.reshape(-1), np.arange(num_rows + 1, dtype=np.int64) * width)

    @classmethod
    def from_scalars(cls, values: Values) -> "Ragged":
        """Return rows of one value each."""
        return cls(values, np.arange(len(values) + 1, dtype=np.int64))

    @classmethod
    def join(cls, parts: "Sequence[Ragged]") -> "Ragged":
        """Return all rows of all parts, of which there is at least one, in order; a copy unless there is only one."""
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([part.lengths for part in parts])
        return cls.from_lengths(np.concatenate([part.covered for part in parts]), lengths)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arrays alone: what dataclasses do for those with slots takes longer than a small batch."""
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
        """Return a view [n, width] of rows that are all equally long. Raise ValueError when they are not."""
        lengths = self.lengths
        width = int(lengths[0]) if len(lengths) else 0
        if not (lengths == width).all():
            raise ValueError("rows of different lengths are no matrix")
        return self.covered.reshape(len(self), width)

    def row(self, index: int) -> Values:
        """Return a view of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def part(self, start: int, end: int) -> "Ragged":
        """Return a view of the rows from `start` up to `end`."""
        return Ragged(self.values, self.offsets[start : end + 1])

    def take(self, rows: NDArray[np.int64]) -> "Ragged":
        """Copy these rows, in this order; a row may be taken twice."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        ends = np.cumsum(lengths)
        # Where each row begins here is where it begins there: the difference, for every value of it.
        shifts = np.repeat(starts - (ends - lengths), lengths)
        return Ragged.from_lengths(self.values[shifts + np.arange(len(shifts))], lengths)
