"""BatchLimits says how large a batch may be, and OpenBatch is a batch that is being filled.

An OpenBatch says how many more sequences fit; it does not know where they come from.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batching.batch import Sequences
from worker.batching.cost import BatchCost

# Returns the largest cost of a batch whose longest sequence has this many tokens. It is called for every
# batch, so the budget can be tuned while the engine runs.
BudgetSource = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on the size of a batch, and on padding where the kernel pads.

    `max_batch_tokens` is the largest cost of a batch (`worker.batching.cost`) unless a BudgetSource overrides
    it.

    In one batch, padding is at most `max_padding_share` of what is computed or `min_padding_tokens`,
    whichever is more: below that, one batch more would cost the device more than the padding does. Over all
    batches, padding is at most `mean_padding_share`, in addition to the padding of sequences when they are
    alone. Batches that pad less save up to `max_saved_tokens` for later batches that pad more. Where padding
    is counted in squares of lengths, a share of tokens is about twice as large a share of squares: both
    shares are multiplied by `square_factor`, and numbers of tokens are converted at the length of the longest
    sequence.

    An interactive batch has at most `urgent_share` of the budget, because someone waits for it, and others
    may arrive meanwhile. Bulk sequences fill it up to `top_up_share`: a GPU needs as long for 2,000 tokens as
    for ten, a CPU 10 ms for 128. While interactive requests arrive, bulk batches are short as well, but never
    below `shortest_bulk_share`.
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
    """A batch that is being filled. It begins empty, and the first sequence always fits."""

    def __init__(self, limits: BatchLimits, cost: BatchCost, saved_padding: float) -> None:
        self._limits = limits
        self._cost = cost
        self._saved_padding = saved_padding
        self._parts: list[tuple[int, NDArray[np.int32], int]] = []  # request, positions, length
        self.num_sequences = 0
        self.max_length = 0
        self._sum_of_costs = 0.0  # of the sequences, each as if alone
        self._sum_of_weights = 0  # in the units in which padding is counted

    @property
    def saved_padding(self) -> float:
        """Return the padding that later batches may use, after this batch has saved or used some.

        Never negative.
        """
        if not self._cost.pads:
            return self._saved_padding
        num_computed = self._cost.weigh(self.max_length) * self.num_sequences
        allowed = self._mean_padding_share(self.max_length) * num_computed
        saved = self._saved_padding + allowed - (num_computed - self._sum_of_weights)
        return min(saved, self._limits.max_saved_tokens * self._weight_of_token(self.max_length))

    def count_fitting(self, length: int, num_waiting: int, budget: float) -> int:
        """Return how many waiting sequences of this length can join within budget and padding limits."""
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
        """Return how many sequences of this length can join before one would cause too much padding."""
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

        # All of these are linear in the count: the padding, what a batch may pad, and what is allowed on the
        # mean of all batches.
        computed_at_0 = weight * self.num_sequences
        slope, at_0 = weight - weight_alone, computed_at_0 - self._sum_of_weights
        above_mean = find_first_positive(
            at_0 - self._saved_padding - mean_share * computed_at_0, slope - mean_share * weight, 1
        )
        above_least = find_first_positive(at_0 - least, slope, 1)
        above_both = find_first_positive(at_0 - share * computed_at_0, slope - share * weight, above_least)
        fitting = int(min(above_mean - 1, above_both - 1, num_waiting))
        # Arithmetic in another order rounds differently, so check the neighbours.
        while fitting and is_too_much(fitting):
            fitting -= 1
        while fitting < num_waiting and not is_too_much(fitting + 1):
            fitting += 1
        return fitting

    def _mean_padding_share(self, max_length: int) -> float:
        """Return the allowed mean share of padding, in addition to that of sequences when they are alone."""
        return max(0.0, self._factor * self._limits.mean_padding_share - self._cost.padding_share(max_length))

    @property
    def _factor(self) -> float:
        """Return the factor by which shares of padding are multiplied; 1 if padding is counted in tokens."""
        return self._limits.square_factor if self._cost.weigh(2) > 2 else 1.0

    def _weight_of_token(self, max_length: int) -> float:
        """Return the weight of one token in a sequence of this length."""
        return self._cost.weigh(max_length) / max_length if max_length else 1.0

    def append(self, taken: list[tuple[int, NDArray[np.int32]]], length: int) -> None:
        """Add sequences of one length, given as requests with their positions."""
        count = sum(len(positions) for _, positions in taken)
        self._parts += [(request, positions, length) for request, positions in taken]
        self.num_sequences += count
        self.max_length = max(self.max_length, length)
        self._sum_of_costs += count * self._cost.of_sequence(length)
        self._sum_of_weights += count * self._cost.weigh(length)

    def close(self) -> Sequences:
        """Return the sequences of the batch in the order in which they joined."""
        counts = [len(positions) for _, positions, _ in self._parts]
        lengths = np.repeat(np.array([length for *_, length in self._parts], np.int32), counts)
        return Sequences(
            np.repeat(np.array([request for request, *_ in self._parts], np.int64), counts),
            np.concatenate([np.zeros(0, np.int32), *(positions for _, positions, _ in self._parts)]),
            lengths,
            self._cost.of_sequences(lengths),
        )


def find_first_positive(at_0: float, slope: float, start: float) -> float:
    """Return the first whole n from `start` on with `at_0 + slope * n` > 0; infinite if there is none."""
    if start == math.inf or at_0 + slope * start > 0:
        return start
    return math.floor(-at_0 / slope) + 1 if slope > 0 else math.inf
