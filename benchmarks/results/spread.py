"""Spread: the median of repeated measurements, with the smallest and the largest of them."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """`low` and `high` are extremes, not quantiles: with three repetitions there is nothing finer to say."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Raises ValueError when there is no value."""
        if not values:
            raise ValueError("a spread needs at least one measurement")
        return cls(statistics.median(values), min(values), max(values))

    def describe(self, write: Callable[[float], str]) -> str:
        """The median, and the extremes behind it where they read differently."""
        median, low, high = write(self.median), write(self.low), write(self.high)
        return median if low == high else f"{median} ({low} to {high})"


def find_percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed (nearest rank): one that was measured.

    Raises ValueError when there is no value.
    """
    if not values:
        raise ValueError("a percentile needs at least one measurement")
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]
