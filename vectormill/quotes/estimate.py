"""Estimate: a number that is not known exactly, with the interval in which it is expected."""

import math
from dataclasses import dataclass
from typing import Self

# 95 % of a normal distribution lie within this number of standard deviations.
DEVIATIONS = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A likely value between the least and the most that it may be. None of them is negative."""

    value: float
    least: float
    most: float

    @classmethod
    def exact(cls, value: float) -> Self:
        return cls(value, value, value)

    @classmethod
    def between(cls, least: float, most: float) -> Self:
        return cls((least + most) / 2, least, most)

    @classmethod
    def around(cls, value: float, share: float) -> Self:
        """Return the value with an interval of this share of it on both sides."""
        return cls(value, value * (1 - share), value * (1 + share))

    @classmethod
    def of_share(cls, num_counted: int, num_sampled: int, *, is_whole: bool) -> Self:
        """Return the share of sampled rows that were counted, with its interval of 95 % (Wilson, 1927)."""
        if is_whole or not num_sampled:
            return cls.exact(num_counted / max(1, num_sampled))
        share, square = num_counted / num_sampled, DEVIATIONS**2
        centre = (share + square / (2 * num_sampled)) / (1 + square / num_sampled)
        spread = math.sqrt(share * (1 - share) / num_sampled + square / (4 * num_sampled**2))
        half = DEVIATIONS * spread / (1 + square / num_sampled)
        return cls(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value + other.value, self.least + other.least, self.most + other.most)

    def __mul__(self, other: "Estimate | float") -> "Estimate":
        by = other if isinstance(other, Estimate) else Estimate.exact(other)
        return Estimate(self.value * by.value, self.least * by.least, self.most * by.most)

    def __truediv__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.value / other.value, self.least / other.most, self.most / other.least)

    def at_least(self, least: float) -> "Estimate":
        return Estimate(*(max(least, value) for value in (self.value, self.least, self.most)))

    @property
    def rest(self) -> "Estimate":
        """Return what is left of 1."""
        return Estimate(1 - self.value, 1 - self.most, 1 - self.least)
