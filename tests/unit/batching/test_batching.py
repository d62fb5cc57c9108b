"""Every sequence is batched once, within the budget, with little padding, the oldest request first."""

import random
import sys
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.batch import Batch
from worker.batching.cost import PackedCost, PaddedCost
from worker.batching.limits import BatchLimits
from worker.batching.pool import SequencePool
from worker.batching.sequences import Sequences

LENGTHS = st.lists(st.integers(1, 600), max_size=60)


class Place(NamedTuple):
    """One sequence of a batch."""

    request: int
    position: int
    length: int


def places(batch: Sequences) -> list[Place]:
    columns = (batch.requests, batch.positions, batch.lengths)
    return [Place(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def drain(pool: SequencePool) -> list[list[Place]]:
    batches = []
    while len(batch := pool.take_batch()):
        assert pool.cost_of(batch) > 0
        batches.append(places(batch))
    return batches


def cost(batch: list[Place]) -> int:
    return max(sequence.length for sequence in batch) * len(batch)


@given(st.lists(st.tuples(LENGTHS, st.booleans()), max_size=8), st.integers(16, 2048))
def test_every_sequence_is_taken_exactly_once(requests: list[tuple[list[int], bool]], budget: int) -> None:
    pool = SequencePool(BatchLimits(budget))
    for number, (lengths, is_interactive) in enumerate(requests):
        pool.add(number, lengths, is_interactive=is_interactive)
    expected = [
        Place(n, p, length) for n, (lengths, _) in enumerate(requests) for p, length in enumerate(lengths)
    ]
    assert len(pool) == len(expected)
    taken = [sequence for batch in drain(pool) for sequence in batch]
    assert sorted(taken, key=lambda s: (s.request, s.position)) == expected
    assert len(pool) == 0


@given(st.lists(LENGTHS, max_size=8), st.integers(16, 2048))
def test_no_batch_costs_more_than_the_budget_except_a_single_sequence(
    requests: list[list[int]], budget: int
) -> None:
    pool = SequencePool(BatchLimits(budget))
    for number, lengths in enumerate(requests):
        pool.add(number, lengths)
    for batch in drain(pool):
        assert cost(batch) <= budget or len(batch) == 1


@given(st.lists(LENGTHS, max_size=8))
def test_no_batch_pads_more_than_its_share(requests: list[list[int]]) -> None:
    limits = BatchLimits(2048, max_padding_share=0.05, min_padding_tokens=64)
    pool = SequencePool(limits)
    for number, lengths in enumerate(requests):
        pool.add(number, lengths)
    for batch in drain(pool):
        assert cost(batch) - sum(s.length for s in batch) <= max(64, 0.05 * cost(batch))


@given(LENGTHS, LENGTHS, st.integers(0, 5))
def test_a_removed_request_is_in_no_later_batch(
    kept: list[int], removed: list[int], num_batches: int
) -> None:
    pool = SequencePool(BatchLimits(512))
    pool.add(1, kept)
    pool.add(2, removed)
    before = [sequence for _ in range(num_batches) for sequence in places(pool.take_batch())]
    pool.remove(2)
    pool.remove(2)
    after = [sequence for batch in drain(pool) for sequence in batch]
    assert all(sequence.request == 1 for sequence in after)
    assert sorted(s.position for s in before + after if s.request == 1) == list(range(len(kept)))


def test_the_oldest_request_is_finished_first_while_its_successors_fill_its_batches() -> None:
    rng = random.Random(0)
    pool = SequencePool(BatchLimits(2048))
    for number in range(6):
        pool.add(number, [rng.randint(5, 256) for _ in range(200)])
    last_batch = {s.request: i for i, batch in enumerate(drain(pool)) for s in batch}
    assert [last_batch[number] for number in range(6)] == sorted(last_batch.values())
    assert last_batch[0] < last_batch[5]


def test_the_longest_sequence_of_the_oldest_request_goes_first() -> None:
    pool = SequencePool(BatchLimits(100, min_padding_tokens=10))
    pool.add(1, [10, 50, 20])
    pool.add(2, [90])
    assert [s.length for s in places(pool.take_batch())] == [50]
    assert [s.length for s in places(pool.take_batch())] == [20, 10]


def test_an_interactive_request_overtakes_bulk_and_its_batch_is_topped_up_with_a_little_bulk() -> None:
    pool = SequencePool(BatchLimits(1000))  # of which 62 for a batch that is topped up
    pool.add(1, [20, 19, 18, 100])
    pool.add(2, [20], is_interactive=True)
    assert {(s.request, s.length) for s in places(pool.take_batch())} == {(2, 20), (1, 20), (1, 19)}


def test_an_interactive_batch_takes_a_quarter_of_the_budget_and_no_bulk_on_top() -> None:
    pool = SequencePool(BatchLimits(1000))
    pool.add(1, [20] * 50)
    pool.add(2, [20] * 30, is_interactive=True)
    assert [(s.request, s.position) for s in places(pool.take_batch())] == [
        (2, position) for position in range(12)
    ]


def test_bulk_leads_now_and_then_however_many_interactive_requests_come() -> None:
    pool = SequencePool(BatchLimits(64))
    pool.add(0, [30])
    for number in range(1, 20):
        pool.add(number, [60], is_interactive=True)
    leaders = [batch[0].request for batch in drain(pool)]
    assert leaders.index(0) == 8


def test_a_short_batch_is_filled_with_slightly_longer_sequences() -> None:
    pool = SequencePool(BatchLimits(1000))
    pool.add(1, [100])
    pool.add(2, [102, 300])
    assert [s.length for s in places(pool.take_batch())] == [100, 102]


def test_sequences_of_a_packed_batch_are_counted_by_their_own_lengths() -> None:
    pool = SequencePool(BatchLimits(100), PackedCost())
    pool.add(1, [50, 5, 30, 80])
    assert [[s.length for s in batch] for batch in drain(pool)] == [[80], [50, 30, 5]]


def test_a_long_sequence_takes_more_of_the_budget_than_its_tokens() -> None:
    pool = SequencePool(BatchLimits(1000), PaddedCost(quadratic_length=100))
    pool.add(1, [100] * 10)
    assert [len(batch) for batch in drain(pool)] == [5, 5]


def test_the_budget_can_change_while_sequences_wait_and_can_depend_on_the_longest() -> None:
    pool = SequencePool(BatchLimits(1000))
    pool.add(1, [100] * 6 + [10] * 6)
    pool.budget = lambda max_length: 200 if max_length > 50 else 30
    assert [len(batch) for batch in drain(pool)] == [2, 2, 2, 3, 3]


def test_taking_batches_does_not_rescan_the_pool() -> None:
    """Four times the sequences take about four times the steps; with rescans they would take sixteen times."""

    def count_lines(num_requests: int) -> int:
        rng = random.Random(0)
        pool = SequencePool(BatchLimits(2048))
        for number in range(num_requests):
            pool.add(number, [rng.randint(3, 256) for _ in range(512)])
        num_lines = 0

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal num_lines
            num_lines += event == "line"
            return count

        earlier = sys.gettrace()
        sys.settrace(count)
        try:
            drain(pool)
        finally:
            sys.settrace(earlier)
        return num_lines

    assert count_lines(8) < 6 * count_lines(2)


def test_a_batch_knows_what_a_padding_kernel_would_compute() -> None:
    batch = Batch.from_ids([np.array([1, 2, 3], np.int32), np.array([4], np.int32)], [1, 0])
    assert (len(batch), batch.num_tokens, batch.num_padded_tokens, batch.max_length) == (2, 4, 6, 3)
    assert batch.input_ids.tolist() == [1, 2, 3, 4]
    assert batch.prompt_lengths is not None
    assert batch.prompt_lengths.tolist() == [1, 0]
