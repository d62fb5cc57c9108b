"""The pool against its rules spelled out one sequence at a time: the same batches, whatever comes and goes."""

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.cost import BatchCost, LengthBuckets, PackedCost, PaddedCost
from worker.batching.limits import BatchLimits
from worker.batching.pool import MAX_INTERACTIVE_IN_ROW, SequencePool

Waiting = tuple[int, int, int]  # request, position, length


class PlainPool:
    """What SequencePool promises, without any haste."""

    def __init__(self, limits: BatchLimits, cost: BatchCost) -> None:
        self.limits, self.cost = limits, cost
        self.waiting: dict[bool, list[Waiting]] = {True: [], False: []}  # interactive ones, and bulk
        self.saved = float(limits.max_saved_tokens)
        self.num_in_row = 0

    def add(self, request: int, lengths: list[int], *, is_interactive: bool) -> None:
        some = [(request, place, self.cost.find_length(length)) for place, length in enumerate(lengths)]
        self.waiting[is_interactive] += some

    def remove(self, request: int) -> None:
        for some in self.waiting.values():
            some[:] = [each for each in some if each[0] != request]

    def take_batch(self, max_bulk_cost: float) -> list[Waiting]:
        limits, budget = self.limits, self.limits.max_batch_tokens
        bulk = min(budget, max(max_bulk_cost, limits.shortest_bulk_share * budget))
        batch: list[Waiting] = []
        if self.waiting[True] and (not self.waiting[False] or self.num_in_row < MAX_INTERACTIVE_IN_ROW):
            self.num_in_row += 1
            anchor = self.find_anchor(self.waiting[True])
            self.fill(batch, self.waiting[True], anchor, limits.urgent_share * budget)
            self.fill(batch, self.waiting[False], anchor, limits.top_up_share * budget)
        else:
            self.num_in_row = 0
            if self.waiting[False]:
                self.fill(batch, self.waiting[False], self.find_anchor(self.waiting[False]), bulk)
        if batch and self.cost.pads:
            computed, padding = self.measure(batch)
            self.saved = min(
                self.saved + self.mean_share(batch) * computed - padding, limits.max_saved_tokens
            )
        return batch

    @staticmethod
    def find_anchor(waiting: list[Waiting]) -> int:
        oldest = min(request for request, *_ in waiting)
        return max(length for request, _, length in waiting if request == oldest)

    def fill(self, batch: list[Waiting], waiting: list[Waiting], anchor: int, budget: float) -> None:
        shorter = sorted((each for each in waiting if each[2] <= anchor), key=lambda each: -each[2])
        longer = sorted((each for each in waiting if each[2] > anchor), key=lambda each: each[2])
        for candidates in (shorter, longer):
            for candidate in candidates:
                if not self.fits([*batch, candidate], budget):
                    break
                batch.append(candidate)
                waiting.remove(candidate)

    def fits(self, batch: list[Waiting], budget: float) -> bool:
        lengths = [length for *_, length in batch]
        alone = sum(map(self.cost.of_sequence, lengths))
        if len(batch) == 1:
            return True
        if self.cost.of_batch(len(batch), max(lengths), alone) > budget:
            return False
        computed, padding = self.measure(batch)
        limits = self.limits
        allowed = max(limits.min_padding_tokens, limits.max_padding_share * computed)
        return not self.cost.pads or padding <= min(allowed, self.saved + self.mean_share(batch) * computed)

    def measure(self, batch: list[Waiting]) -> tuple[int, int]:
        lengths = [length for *_, length in batch]
        return max(lengths) * len(batch), max(lengths) * len(batch) - sum(lengths)

    def mean_share(self, batch: list[Waiting]) -> float:
        longest = max(length for *_, length in batch)
        return max(0.0, self.limits.mean_padding_share - self.cost.padding_share(longest))


LENGTHS = st.lists(st.one_of(st.integers(1, 600), st.integers(20, 30)), min_size=1, max_size=40)
STEPS = st.lists(
    st.one_of(
        st.tuples(LENGTHS, st.booleans()),  # a request comes
        st.sampled_from([float("inf"), 100.0]),  # a batch is taken, of as much bulk at most
        st.integers(0, 6),  # a request is removed
    ),
    max_size=25,
)
COSTS: list[Callable[[], BatchCost]] = [
    lambda: PaddedCost(1024),  # powers of two: both sum without rounding
    lambda: PackedCost(1024),
    lambda: PaddedCost(1024, LengthBuckets(512)),
]


@given(STEPS, st.sampled_from(COSTS), st.sampled_from([32, 256, 1024, 4096]))
def test_batches_are_those_that_the_rules_say(
    steps: list[tuple[list[int], bool] | float | int], make_cost: Callable[[], BatchCost], budget: int
) -> None:
    # Shares that binary fractions hold exactly, so that neither side rounds.
    limits = BatchLimits(
        budget,
        max_padding_share=1 / 16,
        mean_padding_share=1 / 32,
        min_padding_tokens=64,
        max_saved_tokens=128,
    )
    pool, plain = SequencePool(limits, make_cost()), PlainPool(limits, make_cost())
    num_requests = 0
    for step in [*steps, *[float("inf")] * 5]:
        if isinstance(step, tuple):
            lengths, is_interactive = step
            pool.add(num_requests, lengths, is_interactive=is_interactive)
            plain.add(num_requests, lengths, is_interactive=is_interactive)
            num_requests += 1
        elif isinstance(step, int):
            pool.remove(step)
            plain.remove(step)
        else:
            batch = pool.take_batch(step)
            taken = zip(
                batch.requests.tolist(), batch.positions.tolist(), batch.lengths.tolist(), strict=True
            )
            assert sorted(taken) == sorted(plain.take_batch(step))
            assert batch.costs.tolist() == [
                pool.cost.of_sequence(length) for length in batch.lengths.tolist()
            ]
        assert len(pool) == sum(map(len, plain.waiting.values()))


def test_all_that_waits_leaves_with_its_requests_and_what_was_taken_is_not_among_it() -> None:
    pool = SequencePool(BatchLimits(60))
    pool.add(1, [10, 30, 20])
    pool.add(2, [30, 20], np.array([5, 7], np.int32))
    first = pool.take_batch()
    assert (first.requests.tolist(), first.positions.tolist()) == ([1, 2], [1, 5])
    assert sorted((request, positions.tolist()) for request, positions in pool.drain()) == [
        (1, [0]),
        (1, [2]),
        (2, [7]),
    ]
    assert len(pool) == 0
