"""TokenBudget: how many tokens a batch may have, by the length of its longest sequence.

A batch costs something fixed and something for each token. Full batches are doubled until one takes long enough that
the fixed part no longer matters; free memory and exhaustion bound them. Knows nothing of the pool, of devices or of
clocks: whoever runs batches reports what they took. One thread writes; others may read `describe`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

# A batch's class is the first of these that its longest sequence does not exceed. Attention grows with the square of
# the length, and short texts fill a device only in large numbers: a size that is right for one is wrong for another.
LENGTH_CLASSES: Final = (64, 256, 1024, 1 << 30)
SMALLEST_TOKENS: Final = 256
LARGEST_TOKENS: Final = 1 << 20
# A batch that takes so long has outgrown its fixed costs, which are milliseconds: a larger one would only delay others.
LONG_BATCH_SECONDS: Final = 0.1
# Full batches in a row that took less, until they are doubled. The first of a size may take long to prepare.
NUM_SHORT_BATCHES: Final = 8
# Good full batches after an out-of-memory until one step back up is tried; doubled with every relapse.
NUM_GOOD_BATCHES: Final = 64
MOST_DOUBLINGS: Final = 6
# Memory reports from one shrink by the watermark to the next: batches of the old size are still on their way.
NUM_SHRINK_REPORTS: Final = 4


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """The start of budgets and their bounds. `is_tuned` is False for a size that a user gave, which is a ceiling.

    The watermarks are shares of the device's memory: nothing grows above the low one, and what is tuned shrinks above
    the high one.
    """

    start_tokens: int
    is_tuned: bool = True
    high_watermark: float = 0.8
    low_watermark: float = 0.5


@dataclass(slots=True)
class _Class:
    """The budget of one length class."""

    size: int
    ceiling_tokens: int | None = None
    num_out_of_memory: int = 0
    num_relapses: int = 0  # out of memory after growing back
    has_grown_back: bool = False
    tokens_per_second: float = 0.0
    longest_cost: int = 1  # the cost of the longest sequence seen
    num_short: int = 0
    num_good: int = 0
    is_settled: bool = False


class TokenBudget:
    """Decides how much a batch may cost. It is told the outcome of every batch.

    `largest_batch_tokens(length)` is the number of tokens that the free memory holds, by the Footprint; it is replaced
    when more is known.
    """

    def __init__(self, rules: BudgetRules) -> None:
        self.rules = rules
        self.num_shrunk = 0
        self._used_share = 0.0
        self._num_until_shrink = 0
        self.begin()

    def begin(self) -> None:
        """Start anew, for an encoder of which nothing is known."""
        self.forget_bound()
        self._classes = {length_class: _Class(self.rules.start_tokens) for length_class in LENGTH_CLASSES}

    def forget_bound(self) -> None:
        """Forget what the free memory holds."""
        self.largest_batch_tokens: Callable[[int], int] = lambda length: LARGEST_TOKENS

    def max_batch_tokens(self, max_length: int) -> int:
        """Return the most that a batch of sequences up to this length may cost; never less than one sequence."""
        found = self._classes[find_length_class(max_length)]
        return max(max_length, min(found.size, self._ceiling(found, max_length)))

    def observe(
        self, max_length: int, *, num_tokens: int, cost: int, one_more: int, seconds: float, num_streams: int
    ) -> None:
        """Learn from an encoded batch, if it was full: with one more sequence it would have cost too much.

        Costs are as in `worker.batching.cost`; `one_more` is that of another sequence as long as the longest. `seconds`
        are the batch's share of the device's time, of which `num_streams` batches use an equal part each.
        """
        found = self._classes[find_length_class(max_length)]
        found.longest_cost = max(found.longest_cost, one_more)
        most = max(one_more, min(found.size, self._ceiling(found, max_length)))
        if cost <= most < cost + one_more and seconds > 0:
            found.tokens_per_second = blend(found.tokens_per_second, num_tokens / seconds)
            self._grow(found, seconds * num_streams)
            self._grow_back(found)

    def observe_memory(self, used_share: float) -> bool:
        """Note how much of the device's memory is in use, by anyone. Return True if budgets were shrunk because of it.

        Those that a user or a plan has given are not: whoever gave them knew of the memory, and others' use of it
        halves nothing.
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
        """Make half of a batch that did not fit its class's ceiling, from which one sequence is always let off."""
        found = self._classes[find_length_class(max_length)]
        ceiling = max(1, cost // 2)
        found.ceiling_tokens = min(found.ceiling_tokens or ceiling, ceiling)
        found.num_out_of_memory += 1
        found.num_relapses += found.has_grown_back
        found.has_grown_back = False
        found.num_good = 0

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the budget of each length class and how it stands, for the worker's report."""
        return {
            describe_length_class(length_class): {
                "max_batch_tokens": min(found.size, found.ceiling_tokens or found.size),
                "state": self._describe_state(found),
                "tokens_per_second": round(found.tokens_per_second),
                "ceiling_tokens": found.ceiling_tokens,
                "num_out_of_memory": found.num_out_of_memory,
            }
            for length_class, found in self._classes.items()
        }

    def _describe_state(self, found: _Class) -> str:
        if not self.rules.is_tuned:
            return "fixed"
        return "tuned" if found.is_settled else "tuning"

    def _ceiling(self, found: _Class, max_length: int) -> int:
        fits = self.largest_batch_tokens(max_length)
        return min(fits, found.ceiling_tokens) if found.ceiling_tokens is not None else fits

    def _grow(self, found: _Class, seconds: float) -> None:
        """Double the size once enough full batches in a row were short, where that much may be tried."""
        found.num_short = found.num_short + 1 if seconds < LONG_BATCH_SECONDS else 0
        largest = min(LARGEST_TOKENS, self._ceiling(found, found.longest_cost))
        can_grow = (
            self.rules.is_tuned and 2 * found.size <= largest and self._used_share <= self.rules.low_watermark
        )
        found.is_settled = not (can_grow and found.num_short)
        if can_grow and found.num_short >= NUM_SHORT_BATCHES:
            found.size *= 2
            found.num_short = 0

    def _grow_back(self, found: _Class) -> None:
        """Raise the ceiling by half, after an out-of-memory or a shrink, once enough full batches went well."""
        if found.ceiling_tokens is None or self._used_share > self.rules.low_watermark:
            return
        found.num_good += 1
        patience = NUM_GOOD_BATCHES << min(found.num_relapses, MOST_DOUBLINGS)
        if found.num_good < patience:
            return
        found.has_grown_back = True
        found.num_good = 0
        found.ceiling_tokens = found.ceiling_tokens * 3 // 2
        if found.ceiling_tokens > 2 * found.size:
            found.ceiling_tokens = None


def find_length_class(max_length: int) -> int:
    """Return the smallest bound of LENGTH_CLASSES that is not exceeded."""
    return next(length_class for length_class in LENGTH_CLASSES if max_length <= length_class)


def describe_length_class(length_class: int) -> str:
    """Return the name of a length class in reports, such as "up to 64"."""
    if length_class == LENGTH_CLASSES[-1]:
        return f"above {LENGTH_CLASSES[-2]}"
    return f"up to {length_class}"


def blend(average: float, newest: float) -> float:
    """Return a moving average in which a value fades within some ten batches."""
    return 0.9 * average + 0.1 * newest if average else newest
