"""Sequences: tokenized texts on their way through the model, as columns. Knows lengths and owners, not their tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Row i of every column is sequence i. No step here is taken a sequence.

    A request's number grows with every request admitted, so that a smaller one is older; a position is the place of the
    sequence in its request. A length is in tokens, as long as the sequence is computed when it is alone, and its cost
    is that of a batch of it alone (`worker.batching.cost`).
    """

    requests: NDArray[np.int64]  # [n]
    positions: NDArray[np.int32]  # [n]
    lengths: NDArray[np.int32]  # [n]
    costs: NDArray[np.float64]  # [n]

    @classmethod
    def join(cls, parts: "list[Sequences]") -> "Sequences":
        """Return all parts as one, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([np.zeros(0, np.int64), *(part.requests for part in parts)]),
            np.concatenate([np.zeros(0, np.int32), *(part.positions for part in parts)]),
            np.concatenate([np.zeros(0, np.int32), *(part.lengths for part in parts)]),
            np.concatenate([np.zeros(0, np.float64), *(part.costs for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def max_length(self) -> int:
        return int(self.lengths.max(initial=0))

    @property
    def cost_alone(self) -> float:
        """Return the sum of the costs of the sequences, each alone."""
        return float(self.costs.sum())

    def take(self, rows: NDArray[np.int64]) -> "Sequences":
        """Return a copy of these rows, in this order."""
        return Sequences(self.requests[rows], self.positions[rows], self.lengths[rows], self.costs[rows])

    def part(self, start: int, end: int) -> "Sequences":
        """Return the rows from `start` up to `end`; a view."""
        rows = slice(start, end)
        return Sequences(self.requests[rows], self.positions[rows], self.lengths[rows], self.costs[rows])

    def sorted_by_request(self) -> "Sequences":
        """Return the rows with the oldest request first; rows of one request keep their order."""
        if (self.requests[1:] >= self.requests[:-1]).all():
            return self
        return self.take(np.argsort(self.requests, kind="stable"))

    def by_request(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each request and the slice of its rows."""
        bounds = [0, *(np.flatnonzero(np.diff(self.requests)) + 1).tolist(), len(self)]
        for start, end in pairwise(bounds if len(self) else []):
            yield int(self.requests[start]), slice(start, end)
