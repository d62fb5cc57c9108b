"""OpenBatch: a batch while it is being filled. Says how many more fit; knows not where they come from."""

from collections.abc import Iterable

from worker.batching.cost import BatchCost
from worker.batching.limits import BatchLimits
from worker.batching.sequence import Sequence


class OpenBatch:
    """Begins empty; the first sequence always fits."""

    def __init__(self, limits: BatchLimits, cost: BatchCost, saved_padding: float) -> None:
        self._limits = limits
        self._cost = cost
        self._saved_padding = saved_padding
        self.sequences: list[Sequence] = []
        self.max_length = 0
        self.sum_of_costs = 0.0  # of its sequences, each alone
        self._num_tokens = 0

    @property
    def saved_padding(self) -> float:
        """What this batch leaves of the padding that earlier ones saved, and adds to it. Never negative."""
        if not self._cost.pads:
            return self._saved_padding
        num_computed = self.max_length * len(self.sequences)
        allowed = self._mean_padding_share(self.max_length) * num_computed
        return self._saved_padding + allowed - (num_computed - self._num_tokens)

    def count_fitting(self, length: int, num_waiting: int, budget: float) -> int:
        """How many of the waiting sequences of this length can join, within the budget and without much padding."""
        max_length = max(self.max_length, length)
        cost_alone = self._cost.of_sequence(length)
        # The first sequence always fits.
        for count in range(1 if self.sequences else 2, num_waiting + 1):
            total = len(self.sequences) + count
            if self._cost.of_batch(total, max_length, self.sum_of_costs + count * cost_alone) > budget:
                return count - 1
            num_computed = max_length * total
            padding = num_computed - self._num_tokens - count * length
            if self._cost.pads and padding > self._allowed_padding(max_length, num_computed):
                return count - 1
        return num_waiting

    def _allowed_padding(self, max_length: int, num_computed: int) -> float:
        limits = self._limits
        return min(
            max(limits.min_padding_tokens, limits.max_padding_share * num_computed),
            self._saved_padding + self._mean_padding_share(max_length) * num_computed,
        )

    def _mean_padding_share(self, max_length: int) -> float:
        """Of what is computed, beyond what each sequence is padded when it is alone."""
        return max(0.0, self._limits.mean_padding_share - self._cost.padding_share(max_length))

    def append(self, sequences: Iterable[Sequence], length: int) -> None:
        """Sequences of one length join."""
        before = len(self.sequences)
        self.sequences.extend(sequences)
        count = len(self.sequences) - before
        self.max_length = max(self.max_length, length)
        self.sum_of_costs += count * self._cost.of_sequence(length)
        self._num_tokens += count * length
