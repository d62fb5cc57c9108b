"""SequencePool: the waiting sequences of all requests for one model, and the next batch of them.

Knows nothing of devices, tokens or threads: whoever shares it holds a lock.

The next batch is built around an *anchor*, the longest waiting sequence of the oldest request. It is filled with the
sequences nearest in length, of any request, first the shorter ones, then the longer ones. So the oldest chunk is
finished first, its successors are encoded while it is written to the database, and a batch pads little, because it
chooses among the sequences of all chunks in flight.

Interactive requests lead before all others, in short batches. Cost of building a batch: one step per sequence taken
and one per different length visited.
"""

import math
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import Final

from worker.batching.cost import BatchCost, PaddedCost
from worker.batching.limits import BatchLimits, BudgetSource
from worker.batching.open_batch import OpenBatch
from worker.batching.sequence import Sequence
from worker.batching.waiting import WaitingSequences

# In a row, while bulk waits: then bulk leads once, so that a flood of interactive requests does not starve it. They
# are short, so this costs an interactive request at most one bulk batch in the time of two.
MAX_INTERACTIVE_IN_ROW: Final = 8


class SequencePool:
    """Holds sequences until they are taken in batches, or removed with their request."""

    def __init__(self, limits: BatchLimits, cost: BatchCost | None = None) -> None:
        self._limits = limits
        self._cost: BatchCost = cost or PaddedCost()
        self._budget: BudgetSource = lambda max_length: limits.max_batch_tokens
        self._interactive = WaitingSequences()
        self._bulk = WaitingSequences()
        self._num_interactive_in_row = 0
        self._bulk_cost = 0.0  # of all bulk that waits
        self._saved_padding = float(limits.max_saved_tokens)

    def __len__(self) -> int:
        return len(self._interactive) + len(self._bulk)

    @property
    def cost(self) -> BatchCost:
        return self._cost

    @cost.setter
    def cost(self, cost: BatchCost) -> None:
        """To be set while nothing waits: lengths and costs of what waits are those of the former one."""
        self._cost = cost

    @property
    def budget(self) -> BudgetSource:
        return self._budget

    @budget.setter
    def budget(self, budget: BudgetSource) -> None:
        self._budget = budget

    @property
    def has_interactive(self) -> bool:
        return bool(self._interactive)

    def can_fill_batch(self, max_bulk_cost: float = math.inf) -> bool:
        """Whether all bulk that waits would fill a batch, were it not for different lengths."""
        if not self._bulk:
            return False
        return self._bulk_cost >= self._bulk_budget(self._bulk.longest_of_oldest(), max_bulk_cost)

    def cost_of(self, batch: Collection[Sequence]) -> float:
        """What a batch that was taken costs."""
        longest = max(sequence.length for sequence in batch)
        return self._cost.of_batch(len(batch), longest, self._cost_alone(batch))

    def add(
        self,
        request: int,
        lengths: Iterable[int],
        positions: Iterable[int] | None = None,
        *,
        is_interactive: bool = False,
    ) -> None:
        """Adds sequences of a request that is younger than all others, one for each length; their positions are 0, 1,
        2, … unless others are given.
        """
        find_length = self._cost.find_length
        places = zip(count() if positions is None else positions, lengths, strict=False)
        sequences = [Sequence(request, position, find_length(n)) for position, n in places]
        if not sequences:
            return
        if is_interactive:
            self._interactive.add(sequences)
        else:
            self._bulk.add(sequences)
            self._bulk_cost += self._cost_alone(sequences)

    def remove(self, request: int) -> None:
        """Removes what still waits of a request; nothing if it is not in the pool."""
        self._interactive.remove(request)
        self._bulk_cost -= self._cost_alone(self._bulk.remove(request))

    def drain(self) -> list[Sequence]:
        """Everything that waits leaves the pool, to be added again."""
        drained = [*self._interactive.drain(), *self._bulk.drain()]
        self._bulk_cost = 0.0
        return drained

    def take_batch(self, max_bulk_cost: float = math.inf) -> list[Sequence]:
        """The next batch, which leaves the pool; empty when nothing waits. Bulk has at most `max_bulk_cost`."""
        if self._interactive and (not self._bulk or self._num_interactive_in_row < MAX_INTERACTIVE_IN_ROW):
            return self.take_urgent_batch()
        self._num_interactive_in_row = 0
        batch = OpenBatch(self._limits, self._cost, self._saved_padding)
        if self._bulk:
            anchor_length = self._bulk.longest_of_oldest()
            self._fill(
                batch, self._bulk, anchor_length, lambda length: self._bulk_budget(length, max_bulk_cost)
            )
        return self._finish(batch)

    def take_urgent_batch(self) -> list[Sequence]:
        """The next batch that an interactive request leads, topped up with bulk; empty when none waits."""
        batch = OpenBatch(self._limits, self._cost, self._saved_padding)
        if self._interactive:
            self._num_interactive_in_row += 1
            anchor_length = self._interactive.longest_of_oldest()
            urgent, top_up = self._limits.urgent_share, self._limits.top_up_share
            self._fill(batch, self._interactive, anchor_length, lambda length: urgent * self._budget(length))
            self._fill(batch, self._bulk, anchor_length, lambda length: top_up * self._budget(length))
        return self._finish(batch)

    def _fill(
        self, batch: OpenBatch, waiting: WaitingSequences, length: int, budget: Callable[[int], float]
    ) -> None:
        """Takes the sequences nearest in length: shorter ones until one does not fit, then longer ones."""
        for lengths in waiting.lengths_around(length):
            for other in lengths:
                num_waiting = waiting.count(other)
                fitting = batch.count_fitting(other, num_waiting, budget(max(batch.max_length, other)))
                if fitting:
                    batch.append(waiting.take(other, fitting), other)
                    if waiting is self._bulk:
                        self._bulk_cost -= fitting * self._cost.of_sequence(other)
                if fitting < num_waiting:
                    break

    def _bulk_budget(self, length: int, max_bulk_cost: float) -> float:
        budget = self._budget(length)
        return min(budget, max(max_bulk_cost, self._limits.shortest_bulk_share * budget))

    def _finish(self, batch: OpenBatch) -> list[Sequence]:
        self._saved_padding = min(batch.saved_padding, self._limits.max_saved_tokens)
        return batch.sequences

    def _cost_alone(self, sequences: Iterable[Sequence]) -> float:
        return sum(self._cost.of_sequence(sequence.length) for sequence in sequences)
