"""TokenBudget sets the largest cost of a batch, for each class of lengths of its longest sequence.

A batch takes a fixed time and a time for each token, which two sizes tell apart. The size of full batches is doubled
until the fixed part no longer matters, or queries would wait too long; free memory and out-of-memory errors
limit it. The budget knows nothing about the pool, devices or clocks: its caller reports how long batches took. One
thread writes; others may call `describe`.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

# A batch belongs to the first class that its longest sequence does not exceed. Attention grows with the
# square of the length, and short texts fill a device only in large numbers, so one size does not suit all
# lengths.
LENGTH_CLASSES: Final = (64, 256, 1024, 1 << 30)
SMALLEST_TOKENS: Final = 256
LARGEST_TOKENS: Final = 1 << 20
UNPREDICTED: Final = sys.maxsize  # the bound by free memory where the need of a batch cannot be estimated
# Most fixed costs are milliseconds, so they do not matter in a batch that takes this long. A larger one would only
# delay others, unless the fixed cost is known to be more: layers that are copied or gathered for each batch.
LONG_BATCH_SECONDS: Final = 0.1
# A query waits for the batches before it, so one should not take longer than this.
LONGEST_BATCH_SECONDS: Final = 1.0
# The number of full batches in a row that took less, before the size is doubled.
NUM_SHORT_BATCHES: Final = 8
# A size is doubled if its tokens take no more than this share of its time, and twice as many hardly longer. It is
# halved for its time only if they take more than the larger share: twice the size then has less, two thirds.
SHARE_TO_DOUBLE: Final = 0.5
SHARE_TO_HALVE: Final = 0.7
# The number of good full batches after an out-of-memory error before the size grows by a step; doubled with
# every relapse.
NUM_GOOD_BATCHES: Final = 64
MOST_DOUBLINGS: Final = 6
# The number of memory reports between two reductions by the watermark, since batches of the old size are
# still on their way.
NUM_SHRINK_REPORTS: Final = 4


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """The initial size of budgets and the rules that change it.

    `is_tuned` is False if a user gave the size, which then never grows. The watermarks are shares of the
    device's memory: above the high one tuned budgets shrink, and above the low one no budget grows whose need
    of memory is not predicted. With `least_tokens` a device reaches most of its rate: batches of no more tokens grow
    and shrink only by what queries may wait for.
    """

    start_tokens: int
    is_tuned: bool = True
    high_watermark: float = 0.8
    low_watermark: float = 0.5
    least_tokens: int = SMALLEST_TOKENS


@dataclass(slots=True)
class _Class:
    """The budget of one length class and what was learned about it."""

    size: int
    ceiling_tokens: int | None = None
    num_out_of_memory: int = 0
    num_relapses: int = 0  # out-of-memory errors after growing back
    has_grown_back: bool = False
    tokens_per_second: float = 0.0
    longest_cost: int = 1  # the cost of the longest sequence so far
    num_full: int = 0  # full batches of this size
    cost: float = 0.0  # of these, as a moving average
    seconds: float = 0.0
    others: list[tuple[float, float]] = field(default_factory=list)  # these two of up to four sizes before
    num_short: int = 0
    num_good: int = 0
    is_settled: bool = False

    def note(self, cost: int, seconds: float) -> None:
        weight = 0.1 if self.num_full > 2 else 1.0
        self.cost += weight * (cost - self.cost)
        self.seconds += weight * (seconds - self.seconds)

    def count_token_seconds(self, *, of_larger: bool) -> float:
        """Return the seconds that the tokens of a batch take, by the next larger or smaller size that was in use.

        They take all of its time if no other size has shown a fixed cost.
        """
        others = [other for other in self.others if abs(other[0] - self.cost) > self.cost / 8]
        nearest = sorted(
            others, key=lambda each: ((each[0] > self.cost) != of_larger, abs(each[0] - self.cost))
        )
        for cost, seconds in nearest[:1]:
            return self.cost * (self.seconds - seconds) / (self.cost - cost)
        return self.seconds

    def resize(self, size: int) -> None:
        apart = [other for other in self.others if abs(other[0] - self.cost) > self.cost / 4]
        self.others = [*apart[-3:], (self.cost, self.seconds)]
        self.size, self.num_full, self.num_short = size, 0, 0


class TokenBudget:
    """Decides how much a batch may cost, and learns from the outcome of every batch.

    `largest_batch_tokens(length)` returns the number of tokens that fit into the free memory, as the
    Footprint estimates. It is replaced when more is known, and so is `longest_seconds`, what a batch may take so that
    a query is answered in time.
    """

    def __init__(self, rules: BudgetRules) -> None:
        self.rules = rules
        self.num_shrunk = 0
        self.longest_seconds = math.inf
        self._used_share = 0.0
        self._num_until_shrink = 0
        self.begin()

    def begin(self) -> None:
        """Discard all that was learned, because a different encoder was loaded."""
        self.forget_bound()
        self._classes = {length_class: _Class(self.rules.start_tokens) for length_class in LENGTH_CLASSES}

    def forget_bound(self) -> None:
        """Remove the limit by free memory."""
        self.largest_batch_tokens: Callable[[int], int] = lambda length: UNPREDICTED

    def max_batch_tokens(self, max_length: int) -> int:
        """Return the largest cost of a batch with sequences up to this length.

        One sequence is always allowed.
        """
        found = self._classes[find_length_class(max_length)]
        return max(max_length, min(found.size, self._ceiling(found, max_length)))

    def observe(
        self, max_length: int, *, num_tokens: int, cost: int, one_more: int, seconds: float, num_streams: int
    ) -> None:
        """Learn from an encoded batch if it was full, that is, if one more sequence would have cost too much.

        Costs are as in `worker.batching.cost`; `one_more` is the cost of another sequence as long as the
        longest. `seconds` is the batch's share of the device's time, which `num_streams` batches divide
        equally.
        """
        found = self._classes[find_length_class(max_length)]
        found.longest_cost = max(found.longest_cost, one_more)
        most = max(one_more, min(found.size, self._ceiling(found, max_length)))
        if cost <= most < cost + one_more and seconds > 0:
            # A moving average, in which a value fades within about ten batches.
            average, newest = found.tokens_per_second, num_tokens / seconds
            found.tokens_per_second = 0.9 * average + 0.1 * newest if average else newest
            self._tune(found, min(most, found.size), cost, seconds * num_streams)
            self._grow_back(found)

    def observe_memory(self, used_share: float) -> bool:
        """Record the share of the device's memory that is in use by anyone.

        Return True if budgets shrank because of it. Budgets that a user has set never shrink:
        whoever set them knew the memory, and its use by other processes should not halve them.
        """
        self._used_share = used_share
        if not self.rules.is_tuned:
            return False
        self._num_until_shrink = max(0, self._num_until_shrink - 1)
        if used_share <= self.rules.high_watermark or self._num_until_shrink:
            return False
        self._num_until_shrink = NUM_SHRINK_REPORTS
        is_shrunk = False
        for found in self._classes.values():
            size = min(found.size, found.ceiling_tokens or LARGEST_TOKENS)
            if size // 2 >= SMALLEST_TOKENS:
                found.ceiling_tokens = size // 2
                found.num_good = 0
                is_shrunk = True
        self.num_shrunk += is_shrunk
        return is_shrunk

    def observe_out_of_memory(self, max_length: int, cost: int) -> None:
        """Set the ceiling of the length class to half the cost of a batch that ran out of memory.

        A single sequence may always exceed the ceiling.
        """
        found = self._classes[find_length_class(max_length)]
        ceiling = max(1, cost // 2)
        found.ceiling_tokens = min(found.ceiling_tokens or ceiling, ceiling)
        found.num_out_of_memory += 1
        found.num_relapses += found.has_grown_back
        found.has_grown_back = False
        found.num_good = 0

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the budget and the state of each length class, for the worker's report."""
        return {
            describe_length_class(length_class): {
                "max_batch_tokens": min(found.size, found.ceiling_tokens or found.size),
                "state": ("tuned" if found.is_settled else "tuning") if self.rules.is_tuned else "fixed",
                "tokens_per_second": round(found.tokens_per_second),
                "ceiling_tokens": found.ceiling_tokens,
                "num_out_of_memory": found.num_out_of_memory,
            }
            for length_class, found in self._classes.items()
        }

    def _ceiling(self, found: _Class, max_length: int) -> int:
        fits = self.largest_batch_tokens(max_length)
        return min(fits, found.ceiling_tokens) if found.ceiling_tokens is not None else fits

    def _tune(self, found: _Class, most: int, cost: int, seconds: float) -> None:
        """Double or halve the size by the time that full batches of it take, if memory and the limits allow it.

        The first batch of a size may take long to prepare, and says nothing.
        """
        found.num_full += 1
        if found.num_full == 1 or not self.rules.is_tuned:
            found.is_settled = not self.rules.is_tuned
            return
        found.note(cost, seconds)
        longest, of_tokens = self.longest_seconds, found.count_token_seconds(of_larger=False)
        saves = (
            of_tokens > SHARE_TO_HALVE * found.seconds or found.seconds - of_tokens / 2 <= longest < seconds
        )
        if seconds > min(LONGEST_BATCH_SECONDS, longest) and saves and cost <= most:
            # Only a second size tells how much of the time is a fixed cost.
            is_free = seconds > longest or not found.others
            least = SMALLEST_TOKENS if is_free else self.rules.least_tokens
            smaller = max(most // 2, min(most, least))
            if smaller < most:
                found.resize(smaller)
                return
        of_tokens = found.count_token_seconds(of_larger=True)
        is_answered = found.seconds + of_tokens <= longest
        is_small = 2 * found.size <= self.rules.least_tokens and is_answered
        is_cheap = of_tokens <= SHARE_TO_DOUBLE * found.seconds and (is_answered or found.seconds > longest)
        is_short = seconds < LONG_BATCH_SECONDS
        found.num_short = found.num_short + 1 if is_small or is_cheap or is_short else 0
        largest = min(LARGEST_TOKENS, self._ceiling(found, found.longest_cost))
        is_predicted = self.largest_batch_tokens(found.longest_cost) < UNPREDICTED
        watermark = self.rules.high_watermark if is_predicted else self.rules.low_watermark
        can_grow = 2 * found.size <= largest and self._used_share <= watermark
        found.is_settled = not (can_grow and found.num_short)
        if can_grow and found.num_short >= (NUM_SHORT_BATCHES if is_short else 1):
            found.resize(2 * found.size)

    def _grow_back(self, found: _Class) -> None:
        """Raise a lowered ceiling by half, once enough full batches went well."""
        is_short = self.rules.is_tuned and self._used_share > self.rules.high_watermark
        if found.ceiling_tokens is None or is_short:
            return
        found.num_good += 1
        patience = NUM_GOOD_BATCHES << min(found.num_relapses, MOST_DOUBLINGS)
        if found.num_good < patience:
            return
        found.has_grown_back = True
        found.num_good = 0
        found.ceiling_tokens += max(1, found.ceiling_tokens // 2)
        if found.ceiling_tokens > 2 * found.size:
            found.ceiling_tokens = None


def find_length_class(max_length: int) -> int:
    """Return the first length class, given by its longest length, that holds `max_length`."""
    return next(length_class for length_class in LENGTH_CLASSES if max_length <= length_class)


def describe_length_class(length_class: int) -> str:
    """Return the name of a length class in reports, such as "up to 64"."""
    if length_class == LENGTH_CLASSES[-1]:
        return f"above {LENGTH_CLASSES[-2]}"
    return f"up to {length_class}"
