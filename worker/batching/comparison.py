"""Comparison: which of two sizes of batches is faster, and by how much. Knows no climb, no device and no clock.

Their batches take turns, and each is set against the one of the other size that was encoded next to it: what slows the
machine for a while, or texts that grow longer, slow both. What counts is the median of the ratios, of as many pairs as
it takes to tell it from the loss that is tolerated.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

# The share of the best rate that is given up for a smaller size.
TOLERATED_LOSS: Final = 0.02
# With rates that scatter by 3 %, the median of 7 ratios scatters by 2 %, that of 61 by 0.7 %: two sizes that differ by
# 3.5 % are told apart in three of four comparisons by 7, and in 98 of 100 by what `is_decided` asks for, 45 on the mean
# (simulated). Fewer would be of neighbours in length: a chunk's longest texts come first.
FEWEST_PAIRS: Final = 31
MOST_PAIRS: Final = 61
# Standard errors between a median and what it is to be told from.
NUM_ERRORS: Final = 2.0
# How many batches of one size wait for their pair: so many may be on their way when the other size is asked for.
MOST_UNPAIRED: Final = 4
# Batches that could not be filled to the larger size.
MOST_UNFILLED: Final = 40
# Batches in a row that were full by both sizes, as of sequences so long that both hold equally many.
MOST_ALIKE: Final = 100
# Batches after which it is known how long one of that size takes.
NUM_FIRST: Final = 3


class Comparison:
    """`ratio` is the challenger's rate by the incumbent's. Without a challenger nothing is compared."""

    def __init__(self, incumbent: int, challenger: int | None) -> None:
        self.incumbent = incumbent
        self.challenger = challenger
        self._seconds: dict[int, deque[float]] = {
            size: deque(maxlen=MOST_PAIRS) for size in (incumbent, challenger) if size is not None
        }
        # Size and rate, of one size at a time.
        self._unpaired: deque[tuple[int, float]] = deque(maxlen=MOST_UNPAIRED)
        self._ratios: list[float] = []
        self._num_unfilled = 0
        self._num_alike = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._seconds)

    @property
    def next_size(self) -> int:
        """What the next batch should be filled to."""
        if self.challenger is None or not self._unpaired or self._unpaired[0][0] == self.challenger:
            return self.incumbent
        return self.challenger

    @property
    def is_decided(self) -> bool:
        return self.challenger is not None and is_decided(self._ratios)

    @property
    def is_hopeless(self) -> bool:
        """There is no difference to be had: padding keeps the challenger from being full, or both are the same."""
        is_vain = self._num_unfilled >= MOST_UNFILLED or self._num_alike >= MOST_ALIKE
        return self.challenger is not None and is_vain

    @property
    def ratio(self) -> float:
        return median(self._ratios)

    @property
    def seconds(self) -> dict[int, float]:
        """Of a full batch, of each size of which enough have been encoded."""
        return {size: median(taken) for size, taken in self._seconds.items() if len(taken) >= NUM_FIRST}

    def observe(self, size: int, rate: float, seconds: float) -> None:
        """A batch that was filled to one of the sizes."""
        self._seconds[size].append(seconds)
        self._num_alike = 0
        if self.challenger is None:
            return
        if not self._unpaired or self._unpaired[0][0] == size:
            self._unpaired.append((size, rate))
            return
        other = self._unpaired.pop()[1]  # the newest, which is the nearest
        self._ratios.append(rate / other if size == self.challenger else other / rate)

    def observe_alike(self, seconds: float) -> None:
        """A batch that is full by both sizes says nothing of their difference."""
        for taken in self._seconds.values():
            taken.append(seconds)
        self._num_alike += 1

    def observe_unfilled(self) -> None:
        """A batch was meant for the challenger and had more than the incumbent may have, but was not full."""
        self._num_unfilled += 1


def is_decided(ratios: Sequence[float]) -> bool:
    """Whether their median is known well enough to say if it is within the loss that is tolerated, or will not be."""
    if len(ratios) < FEWEST_PAIRS:
        return False
    if len(ratios) >= MOST_PAIRS:
        return True
    middle = median(ratios)
    # Of a normal distribution, by the median of the deviations, which a batch that something else slowed does not move.
    deviation = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    standard_error = math.sqrt(math.pi / 2 / len(ratios)) * deviation
    return abs(abs(middle - 1) - TOLERATED_LOSS) > NUM_ERRORS * standard_error
