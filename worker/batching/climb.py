"""Climb: finds the knee of tokens per second over the size of batches, by measuring. Knows no device and no clock.

Sizes are compared two at a time, an incumbent and a challenger of twice or half its size. Each size is measured against
its neighbour once, so that a climb ends; then it stays at the smallest size whose rate is within 2 % of the best,
because a larger one only takes more memory and lets interactive texts wait longer.

A climb first looks down, and up only from a size that is clearly faster than its half. What a batch costs beside its
tokens is nearly fixed, so that of all a larger batch could bring, each doubling brings half: all others together bring
no more than the last one did, and the memory of batches that are too large is never taken.
"""

from collections.abc import Collection, Mapping
from typing import Final

from worker.batching.comparison import TOLERATED_LOSS, Comparison

STEP: Final = 2
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
        self._comparison = self._begin_comparison()

    @property
    def max_batch_tokens(self) -> int:
        """What the next batch should be filled to."""
        return self._comparison.next_size

    @property
    def settled_tokens(self) -> int:
        """The best size known so far."""
        return choose_size(self.rates)

    @property
    def is_settled(self) -> bool:
        return self._comparison.challenger is None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that are being compared; the chosen one alone when nothing is."""
        return self._comparison.sizes

    def limit(self, smallest: int, largest: int) -> None:
        """From now on nothing else is tried. A limit that is lifted lets the climb go on where it was stopped."""
        if (smallest, largest) != (self._smallest, self._largest):
            self._smallest, self._largest = smallest, largest
            if self.is_settled or max(self.sizes) > largest:
                self._comparison = self._begin_comparison()

    def observe(self, sizes: Collection[int], cost: float, seconds: float) -> None:
        """A batch that is full by these of the sizes, and what its sequences cost when each is alone."""
        comparison = self._comparison
        if len(sizes) > 1:
            comparison.observe_alike(seconds)
        else:
            for size in sizes:
                comparison.observe(size, cost / seconds, seconds)
        self.seconds |= comparison.seconds
        self._go_on()

    def observe_unfilled(self) -> None:
        """A batch was meant for the challenger and had more than the incumbent may have, but padding kept it from being
        full. When that is the rule, the larger size is not to be had, and is taken to bring nothing.
        """
        self._comparison.observe_unfilled()
        self._go_on()

    def _go_on(self) -> None:
        comparison = self._comparison
        if comparison.is_decided:
            self._end_comparison(comparison.ratio)
        elif comparison.is_hopeless:
            self._end_comparison(ratio=1.0)
        elif self._is_too_long(comparison):
            self._comparison = self._begin_comparison()

    def _is_too_long(self, comparison: Comparison) -> bool:
        """Not first the whole comparison with batches of twice the time, if already the incumbent's take too long."""
        is_upward = comparison.challenger == comparison.incumbent * STEP
        return is_upward and self.seconds.get(comparison.incumbent, 0.0) > LONGEST_SECONDS

    def _end_comparison(self, ratio: float) -> None:
        incumbent, challenger = self._comparison.incumbent, self._comparison.challenger
        assert challenger is not None
        # In a new dictionary: another thread may be reading the one that is there, for the worker's report.
        self.rates = {**self.rates, challenger: self.rates[incumbent] * ratio}
        self._comparison = self._begin_comparison()

    def _begin_comparison(self) -> Comparison:
        pair = choose_pair(self.rates, self.seconds, self._smallest, self._largest)
        return Comparison(*pair) if pair else Comparison(self.settled_tokens, None)


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
