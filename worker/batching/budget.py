"""TokenBudget: how many tokens a batch may have, by the length of its longest sequence. Learns from what batches cost.

Knows nothing of the pool, of devices or of clocks: whoever runs batches tells it what came of them. Used by one thread;
others may read `describe`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from worker.batching.climb import STEP, Climb

logger = logging.getLogger(__name__)

# A batch's class is the first of these that its longest sequence does not exceed. Attention grows with the square of
# the length, and short texts fill a device only in large numbers: a knee found for one class is wrong for another.
LENGTH_CLASSES: Final = (64, 256, 1024, 1 << 30)
SMALLEST_TOKENS: Final = 256
LARGEST_TOKENS: Final = 1 << 20
# Good full batches after an out-of-memory until one step back up is tried; doubled with every relapse.
NUM_GOOD_BATCHES: Final = 64
MOST_DOUBLINGS: Final = 6
# Memory reports from one shrink by the watermark to the next: batches of the old size are still on their way.
NUM_SHRINK_REPORTS: Final = 4
# A knee that was measured while others used the machine, or of which it was left to us since, is measured again: when
# after so many full batches the rate is not within this factor of the one that was remembered. Lengths within a class
# make less of a difference; where they make more, a climb too many is made.
NUM_COMPARED: Final = 32
FAR_OFF: Final = 2.0


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """Where budgets start and what bounds them. `is_tuned` is false for a size that a user has given: it is a ceiling.

    The watermarks are shares of the device's memory: nothing grows above the low one, and what is tuned shrinks above
    the high one.
    """

    start_tokens: int
    is_tuned: bool = True
    high_watermark: float = 0.8
    low_watermark: float = 0.5


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """What is to be known of a batch that came back. Costs are as in `worker.batching.cost`.

    `cost_alone` is without padding, of its sequences when each is alone, and `one_more` of the longest of them.
    """

    max_length: int
    num_tokens: int
    cost: int
    cost_alone: float
    one_more: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LearnedClass:
    """What is known of one length class, to be kept for the next start.

    `ceiling_tokens` is from out-of-memory; `num_relapses` counts those that came after growing back.
    """

    rates: Mapping[int, float]
    seconds: Mapping[int, float]
    tokens_per_second: float = 0.0
    ceiling_tokens: int | None = None
    num_out_of_memory: int = 0
    num_relapses: int = 0


class _Class:
    """What is known of one length class."""

    def __init__(self, climb: Climb, learned: LearnedClass) -> None:
        self.climb = climb
        self.ceiling_tokens = learned.ceiling_tokens
        self.num_out_of_memory = learned.num_out_of_memory
        self.num_relapses = learned.num_relapses
        self.has_grown_back = False
        self.tokens_per_second = learned.tokens_per_second
        self.remembered_rate = learned.tokens_per_second if len(learned.rates) > 1 else 0.0
        self.num_compared = 0
        self.longest_cost = 1  # the cost of the longest sequence seen
        self.num_good = 0


class TokenBudget:
    """Answers the pool's question, and is told the outcome of every batch.

    `largest_batch_tokens(length)` says what the free memory holds, by the Footprint; it is replaced when more is known.
    `is_changed` says that something was learned that is worth keeping.
    """

    def __init__(self, rules: BudgetRules) -> None:
        self.rules = rules
        self.forget_bound()
        self.is_changed = False
        self.num_shrunk = 0
        self._used_share = 0.0
        self._num_until_shrink = 0
        self._classes: dict[int, _Class] = {}
        self.recall({})

    def forget_bound(self) -> None:
        """What the free memory holds is not known."""
        self.largest_batch_tokens: Callable[[int], int] = lambda length: LARGEST_TOKENS

    def recall(self, learned: Mapping[int, LearnedClass]) -> None:
        """Begins where an earlier TokenBudget ended. A size that a user has given needs no rates."""
        for length_class in LENGTH_CLASSES:
            known = learned.get(length_class, LearnedClass({}, {}))
            rates = known.rates if self.rules.is_tuned else {}
            self._classes[length_class] = _Class(self._begin_climb(rates, known.seconds), known)

    @property
    def _smallest_tried(self) -> int:
        return SMALLEST_TOKENS if self.rules.is_tuned else self.rules.start_tokens

    @property
    def _largest_tried(self) -> int:
        return LARGEST_TOKENS if self.rules.is_tuned else self.rules.start_tokens

    def _begin_climb(self, rates: Mapping[int, float], seconds: Mapping[int, float]) -> Climb:
        return Climb(self.rules.start_tokens, self._smallest_tried, self._largest_tried, rates, seconds)

    def max_batch_tokens(self, max_length: int) -> int:
        """Padded tokens that a batch may have whose longest sequence is `max_length`; never less than one sequence."""
        found = self._classes[find_length_class(max_length)]
        return max(max_length, min(found.climb.max_batch_tokens, self._ceiling(found, max_length)))

    def observe(self, batch: EncodedBatch) -> None:
        """A batch came back. Only full ones say anything: with one more sequence it would have cost too much."""
        found = self._classes[find_length_class(batch.max_length)]
        found.longest_cost = max(found.longest_cost, batch.one_more)
        self._limit(found)
        ceiling = self._ceiling(found, batch.max_length)
        bounds = {size: max(batch.one_more, min(size, ceiling)) for size in found.climb.sizes}
        # More than one where the sequences are so long that both sizes hold equally many of them.
        filled = [size for size, most in bounds.items() if batch.cost <= most < batch.cost + batch.one_more]
        num_known = len(found.climb.rates)
        if not filled:
            if batch.cost > min(bounds.values()):
                found.climb.observe_unfilled()
        elif batch.seconds > 0:
            found.tokens_per_second = blend(found.tokens_per_second, batch.num_tokens / batch.seconds)
            if self.rules.is_tuned:
                found.climb.observe(filled, batch.cost_alone, batch.seconds)
            self._compare_with_remembered(found)
            self._grow_back(found)
        self.is_changed |= len(found.climb.rates) != num_known

    def observe_memory(self, used_share: float) -> bool:
        """How much of the device's memory is in use, by anyone. True when budgets were shrunk because of it. Those that
        a user or a plan has given are not: whoever gave them knew of the memory, and others' use of it halves nothing.
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
            size = min(found.climb.settled_tokens, found.ceiling_tokens or LARGEST_TOKENS)
            if size // 2 >= SMALLEST_TOKENS:
                found.ceiling_tokens = size // 2
                found.num_good = 0
                is_shrunk = True
        self.num_shrunk += is_shrunk
        return is_shrunk

    def observe_out_of_memory(self, max_length: int, cost: int) -> None:
        """A batch did not fit: half of it is its class's ceiling, from which one sequence is always let off."""
        found = self._classes[find_length_class(max_length)]
        ceiling = max(1, cost // 2)
        found.ceiling_tokens = min(found.ceiling_tokens or ceiling, ceiling)
        found.num_out_of_memory += 1
        found.num_relapses += found.has_grown_back
        found.has_grown_back = False
        found.num_good = 0
        self._limit(found)
        self.is_changed = True

    def learn(self) -> dict[int, LearnedClass]:
        """What the next start should know."""
        self.is_changed = False
        return {
            length_class: LearnedClass(
                dict(found.climb.rates),
                dict(found.climb.seconds),
                found.tokens_per_second,
                found.ceiling_tokens if found.num_out_of_memory else None,
                found.num_out_of_memory,
                found.num_relapses,
            )
            for length_class, found in self._classes.items()
            if len(found.climb.rates) > 1 or found.num_out_of_memory
        }

    def describe(self) -> dict[str, dict[str, Any]]:
        """For the worker's report: by length class, the budget and how it stands."""
        return {
            describe_length_class(length_class): {
                "max_batch_tokens": self._describe_size(found),
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
        return "tuned" if found.climb.is_settled else "tuning"

    def _describe_size(self, found: _Class) -> int:
        size = found.climb.settled_tokens
        return min(size, found.ceiling_tokens or size)

    def _ceiling(self, found: _Class, max_length: int) -> int:
        fits = self.largest_batch_tokens(max_length)
        return min(fits, found.ceiling_tokens) if found.ceiling_tokens is not None else fits

    def _limit(self, found: _Class) -> None:
        """What may be tried: no less than one sequence, and above the low watermark nothing new that is larger."""
        largest = min(self._largest_tried, self._ceiling(found, found.longest_cost))
        if self._used_share > self.rules.low_watermark:
            largest = min(largest, max(found.climb.rates))
        found.climb.limit(max(self._smallest_tried, found.longest_cost), largest)

    def _compare_with_remembered(self, found: _Class) -> None:
        """Once a start: begins the climb anew if the machine is far from what it was. Ceilings stay."""
        if not found.remembered_rate or not self.rules.is_tuned:
            return
        found.num_compared += 1
        if found.num_compared < NUM_COMPARED:
            return
        then, now = found.remembered_rate, found.tokens_per_second
        found.remembered_rate = 0.0
        if not then / FAR_OFF <= now <= then * FAR_OFF:
            logger.info(
                "Batch sizes are measured again: %.0f tokens/s, and %.0f when they were kept.", now, then
            )
            found.climb = self._begin_climb({}, {})

    def _grow_back(self, found: _Class) -> None:
        """After an out-of-memory or a shrink: half as much again, once enough full batches went well."""
        if found.ceiling_tokens is None or self._used_share > self.rules.low_watermark:
            return
        found.num_good += 1
        patience = NUM_GOOD_BATCHES << min(found.num_relapses, MOST_DOUBLINGS)
        if found.num_good < patience:
            return
        found.has_grown_back = True
        found.num_good = 0
        found.ceiling_tokens = found.ceiling_tokens * 3 // 2
        if found.ceiling_tokens > STEP * max(found.climb.rates):
            found.ceiling_tokens = None
        self.is_changed = True


def find_length_class(max_length: int) -> int:
    return next(length_class for length_class in LENGTH_CLASSES if max_length <= length_class)


def describe_length_class(length_class: int) -> str:
    if length_class == LENGTH_CLASSES[-1]:
        return f"above {LENGTH_CLASSES[-2]}"
    return f"up to {length_class}"


def blend(average: float, newest: float) -> float:
    """A moving average in which a value fades within some ten batches."""
    return 0.9 * average + 0.1 * newest if average else newest
