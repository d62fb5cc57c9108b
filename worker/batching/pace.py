"""Pace: how fast batches are encoded, and when the runner will have none left. Knows no batches, only what they cost.

A forecast, never a promise: who relies on it must be right, if slower, when it is wrong.
"""

import math
from typing import Final

# How much less a batch counts than the next one: about the last eight do.
FADING: Final = 0.875


class Pace:
    """Told when batches are sent and come back. All moments are on one clock that never goes back."""

    def __init__(self) -> None:
        # Of the last batches. Their sums, not the mean of their ratios: a tiny batch takes long for what it costs.
        self._cost = 0.0
        self._seconds = 0.0
        self._cost_ahead = 0.0
        self._free_at = -math.inf

    @property
    def free_at(self) -> float:
        """When the runner will have encoded all that was sent; in the past when it is idle."""
        return self._free_at

    def cost_within(self, seconds: float) -> float:
        """What is encoded in this time; infinite as long as no batch has come back."""
        return seconds / self._seconds_of(1) if self._seconds else math.inf

    def note_sent(self, cost: float, now: float) -> None:
        self._cost_ahead += cost
        self._free_at = max(now, self._free_at) + self._seconds_of(cost)

    def note_encoded(self, cost: float, seconds: float, now: float) -> None:
        self._cost = FADING * self._cost + cost
        self._seconds = FADING * self._seconds + seconds
        self._cost_ahead = max(0.0, self._cost_ahead - cost)
        self._free_at = now + self._seconds_of(self._cost_ahead)

    def note_idle(self, now: float) -> None:
        """The runner has nothing: batches that failed or were lost are not ahead any more."""
        self._cost_ahead = 0.0
        self._free_at = min(self._free_at, now)

    def _seconds_of(self, cost: float) -> float:
        return cost * self._seconds / self._cost if self._cost else 0.0
