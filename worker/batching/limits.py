"""Limits: how large a batch may be, and a batch while it is being filled.

Says how many more fit; knows not where they come from.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batching.batch import Sequences
from worker.batching.cost import BatchCost

# The largest cost of a batch whose longest sequence has that many tokens. Asked for every batch, so that it may be
# tuned while the engine runs.
BudgetSource = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on the size of a batch, and on padding where the kernel pads.

    `max_batch_tokens` is the largest cost of a batch (`worker.batching.cost`) until a BudgetSource says otherwise.

    A batch pads at most `max_padding_share` of what is computed or `min_padding_tokens`, whichever is more: below that,
    one batch more would cost the device more than the padding does. All batches together pad at most
    `mean_padding_share`, with what sequences are padded when they are alone: what batches of good neighbours did not
    use, up to `max_saved_tokens`, is left to worse ones. Where padding is counted in squares of lengths, a share of
    tokens is about twice as large a share of them: both shares are `square_factor` times as large, and tokens are those
    of the longest sequence.

    An interactive batch is short, because someone waits, and others may come meanwhile: `urgent_share` of the budget.
    Bulk fills it up to `top_up_share`: a GPU needs as long for 2,000 tokens as for ten, a CPU 10 ms for 128. While
    interactive requests come, bulk batches are short, too, but never below `shortest_bulk_share`.
    """

    max_batch_tokens: int
    max_padding_share: float = 0.05
    min_padding_tokens: int = 64
    mean_padding_share: float = 0.025
    max_saved_tokens: int = 256
    square_factor: float = 1.6
    urgent_share: float = 1 / 4
    top_up_share: float = 1 / 16
    shortest_bulk_share: float = 1 / 8


class OpenBatch:
    """A batch while it is being filled. Begins empty; the first sequence always fits."""

    def __init__(self, limits: BatchLimits, cost: BatchCost, saved_padding: float) -> None:
        self._limits = limits
        self._cost = cost
        self._saved_padding = saved_padding
        self._parts: list[tuple[int, NDArray[np.int32], int]] = []  # request, positions, length
        self.num_sequences = 0
        self.max_length = 0
        self._sum_of_costs = 0.0  # of its sequences, each alone
        self._sum_of_weights = 0  # as padding is counted

    @property
    def saved_padding(self) -> float:
        """Return the padding that later batches may use, with what this one saved or used. Never negative."""
        if not self._cost.pads:
            return self._saved_padding
        num_computed = self._cost.weigh(self.max_length) * self.num_sequences
        allowed = self._mean_padding_share(self.max_length) * num_computed
        saved = self._saved_padding + allowed - (num_computed - self._sum_of_weights)
        return min(saved, self._limits.max_saved_tokens * self._weight_of_token(self.max_length))

    def count_fitting(self, length: int, num_waiting: int, budget: float) -> int:
        """Return how many waiting sequences of this length can join, within the budget and without much padding."""
        max_length = max(self.max_length, length)
        cost_alone = self._cost.of_sequence(length)
        within_budget = bisect_right(
            range(1, num_waiting + 1),
            budget,
            key=lambda count: self._cost.of_batch(
                self.num_sequences + count, max_length, self._sum_of_costs + count * cost_alone
            ),
        )
        fitting = (
            within_budget if not self._cost.pads else self._count_padded(length, max_length, within_budget)
        )
        return max(fitting, int(not self.num_sequences))

    def _count_padded(self, length: int, max_length: int, num_waiting: int) -> int:
        """Return how many can join before the first one that would pad too much."""
        mean_share, share = (
            self._mean_padding_share(max_length),
            self._factor * self._limits.max_padding_share,
        )
        least = self._limits.min_padding_tokens * self._weight_of_token(max_length)
        weight, weight_alone = self._cost.weigh(max_length), self._cost.weigh(length)

        def is_too_much(count: int) -> bool:
            num_computed = weight * (self.num_sequences + count)
            padding = num_computed - self._sum_of_weights - count * weight_alone
            return padding > min(
                max(least, share * num_computed), self._saved_padding + mean_share * num_computed
            )

        # All are linear in the count: padding, what is allowed always, of this batch and on the mean of all batches.
        computed_at_0 = weight * self.num_sequences
        slope, at_0 = weight - weight_alone, computed_at_0 - self._sum_of_weights
        above_mean = find_first_positive(
            at_0 - self._saved_padding - mean_share * computed_at_0, slope - mean_share * weight, 1
        )
        above_least = find_first_positive(at_0 - least, slope, 1)
        above_both = find_first_positive(at_0 - share * computed_at_0, slope - share * weight, above_least)
        fitting = int(min(above_mean - 1, above_both - 1, num_waiting))
        # Arithmetic in another order is rounded in another way.
        while fitting and is_too_much(fitting):
            fitting -= 1
        while fitting < num_waiting and not is_too_much(fitting + 1):
            fitting += 1
        return fitting

    def _mean_padding_share(self, max_length: int) -> float:
        """Return the allowed mean share of padding, beyond what each sequence is padded when it is alone."""
        return max(0.0, self._factor * self._limits.mean_padding_share - self._cost.padding_share(max_length))

    @property
    def _factor(self) -> float:
        """Return the factor for shares of padding; 1 where padding is counted in tokens."""
        return self._limits.square_factor if self._cost.weigh(2) > 2 else 1.0

    def _weight_of_token(self, max_length: int) -> float:
        """Return the weight of one token in a sequence of this length."""
        return self._cost.weigh(max_length) / max_length if max_length else 1.0

    def append(self, taken: list[tuple[int, NDArray[np.int32]]], length: int) -> None:
        """Add sequences of one length, as positions of requests."""
        count = sum(len(positions) for _, positions in taken)
        self._parts += [(request, positions, length) for request, positions in taken]
        self.num_sequences += count
        self.max_length = max(self.max_length, length)
        self._sum_of_costs += count * self._cost.of_sequence(length)
        self._sum_of_weights += count * self._cost.weigh(length)

    def close(self) -> Sequences:
        """Return its sequences in the order in which they joined."""
        counts = [len(positions) for _, positions, _ in self._parts]
        lengths = np.repeat(np.array([length for *_, length in self._parts], np.int32), counts)
        return Sequences(
            np.repeat(np.array([request for request, *_ in self._parts], np.int64), counts),
            np.concatenate([np.zeros(0, np.int32), *(positions for _, positions, _ in self._parts)]),
            lengths,
            self._cost.of_sequences(lengths),
        )


def find_first_positive(at_0: float, slope: float, start: float) -> float:
    """Return the first whole number from `start` on at which `at_0 + slope * n` is above 0; infinite if none."""
    if start == math.inf or at_0 + slope * start > 0:
        return start
    return math.floor(-at_0 / slope) + 1 if slope > 0 else math.inf
