"""Climb: finds the knee of tokens per second over the size of batches, by measuring. Knows no device and no clock.

Sizes are compared two at a time, an incumbent and a challenger of twice or half its size, whose batches alternate: a
machine that grows slower for a while, or texts that grow longer, slow both. What counts is the median of the ratios,
of as many pairs as it takes to tell it from the loss that is tolerated. Each size is measured against its neighbour
once, so that a climb ends; then it stays at the smallest size whose rate is within 2 % of the best, because a larger
one only takes more memory and lets interactive texts wait longer.

A climb first looks down, and up only from a size that is clearly faster than its half. What a batch costs beside its
tokens is nearly fixed, so that of all a larger batch could bring, each doubling brings half: all others together bring
no more than the last one did, and the memory of batches that are too large is never taken.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

STEP: Final = 2
# Pairs of full batches in a comparison. With rates that scatter by 3 %, the median of 7 ratios scatters by 2 %, that of
# 61 by 0.7 %: two sizes that differ by 3.5 % are told apart in three of four comparisons by 7, and in 97 of 100 by what
# `is_decided` asks for, 34 on the mean (simulated).
FEWEST_PAIRS: Final = 11
MOST_PAIRS: Final = 61
# Standard errors between a median and what it is to be told from.
NUM_ERRORS: Final = 2.0
# Batches in a comparison that could not be filled to the larger size.
MOST_UNFILLED: Final = 40
# Batches after which it is known how long one of that size takes.
NUM_FIRST: Final = 3
TOLERATED_LOSS: Final = 0.02
# A batch that takes so long has outgrown every fixed cost, which are milliseconds: a larger one would only delay.
LONGEST_SECONDS: Final = 0.5


class Climb:
    """Rates are relative to that of the first size, their first key, and chained: 2 to 1 times 4 to 2 is 4 to 1."""

    def __init__(
        self,
        start: int,
        smallest: int,
        largest: int,
        rates: Mapping[int, float] | None = None,
        seconds: Mapping[int, float] | None = None,
    ) -> None:
        self._smallest = smallest
        self._largest = largest
        self.rates: dict[int, float] = dict(rates or {min(start, largest): 1.0})
        self.seconds: dict[int, float] = dict(seconds or {})  # of a full batch of that size
        self._choose_pair()

    @property
    def max_batch_tokens(self) -> int:
        """What the next batch should be filled to."""
        if self._challenger is None:
            return self._incumbent
        is_behind = len(self._samples[self._challenger]) < len(self._samples[self._incumbent])
        return self._challenger if is_behind else self._incumbent

    @property
    def settled_tokens(self) -> int:
        """The best size known so far."""
        return choose_size(self.rates)

    @property
    def is_settled(self) -> bool:
        return self._challenger is None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that are being compared; the chosen one alone when nothing is."""
        return tuple(self._samples)

    def limit(self, smallest: int, largest: int) -> None:
        """From now on nothing else is tried. A limit that is lifted lets the climb go on where it was stopped."""
        if (smallest, largest) != (self._smallest, self._largest):
            self._smallest, self._largest = smallest, largest
            if self._challenger is None or max(self._incumbent, self._challenger) > largest:
                self._choose_pair()

    def observe(self, size: int, num_tokens: int, seconds: float) -> None:
        """A batch that was filled to `size` and took so long."""
        if size not in self._samples:
            return
        samples = self._samples[size]
        if len(samples) < MOST_PAIRS:
            samples.append((num_tokens / seconds, seconds))
        if len(samples) == NUM_FIRST and max(self._samples) > size:
            # Not first the whole comparison with batches of twice the time, if already these take too long.
            self.seconds[size] = median(seconds for _, seconds in samples)
            if self.seconds[size] > LONGEST_SECONDS and self._challenger == size * STEP:
                self._choose_pair()
                return
        if self._challenger is not None:
            ratios = self._pair_ratios(self._incumbent, self._challenger)
            if is_decided(ratios):
                self._note_rate(self._challenger, self.rates[self._incumbent] * median(ratios))
                for measured, pairs in self._samples.items():
                    self.seconds[measured] = median(seconds for _, seconds in pairs)
                self._choose_pair()

    def observe_unfilled(self) -> None:
        """A batch was meant for the challenger and had more than the incumbent may have, but padding kept it from being
        full. When that is the rule, the larger size is not to be had, and is taken to bring nothing.
        """
        self._num_unfilled += 1
        if self._challenger is not None and self._num_unfilled >= MOST_UNFILLED:
            self._note_rate(self._challenger, self.rates[self._incumbent])
            self._choose_pair()

    def _pair_ratios(self, incumbent: int, challenger: int) -> list[float]:
        """Of as many batches as both have."""
        ours, theirs = self._samples[incumbent], self._samples[challenger]
        return [their / our for (our, _), (their, _) in zip(ours, theirs, strict=False)]

    def _note_rate(self, size: int, rate: float) -> None:
        # In a new dictionary: another thread may be reading the one that is there, for the worker's report.
        self.rates = {**self.rates, size: rate}

    def _choose_pair(self) -> None:
        pair = choose_pair(self.rates, self.seconds, self._smallest, self._largest)
        self._incumbent: int = pair[0] if pair else self.settled_tokens
        self._challenger: int | None = pair[1] if pair else None
        self._num_unfilled = 0
        # Rate and seconds of each batch, by size.
        self._samples: dict[int, list[tuple[float, float]]] = {
            size: [] for size in pair or (self._incumbent,)
        }


def choose_pair(
    rates: Mapping[int, float],
    seconds: Mapping[int, float],
    smallest: int,
    largest: int,
) -> tuple[int, int] | None:
    """The next two sizes to compare, incumbent first; None when the knee is known as far as it may be looked for."""
    rates = {size: rate for size, rate in rates.items() if size <= largest}
    if not rates:
        return None
    top, bottom = max(rates), min(rates)
    is_alone = top == bottom
    has_gained = rates[top] >= (1 + TOLERATED_LOSS) * rates.get(top // STEP, 0.0)
    can_go_up = top * STEP <= largest and seconds.get(top, 0.0) <= LONGEST_SECONDS
    can_go_down = bottom // STEP >= smallest
    if can_go_up and has_gained and not (is_alone and can_go_down):
        return top, top * STEP
    # Also where the first size has outgrown a cache, and all above it is slow alike.
    if can_go_down and (is_alone or rates[bottom] >= (1 - TOLERATED_LOSS) * max(rates.values())):
        return bottom, bottom // STEP
    return None


def choose_size(rates: Mapping[int, float]) -> int:
    """The smallest size whose rate is as good as the best."""
    best = max(rates.values())
    return min(size for size, rate in rates.items() if rate >= (1 - TOLERATED_LOSS) * best)


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
