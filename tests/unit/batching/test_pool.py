"""The pool against its rules spelled out one sequence at a time: the same batches, whatever comes and goes; and when
the runner gets its next batch, by moments that are the test's own.
"""

import random
import sys
from collections.abc import Callable
from itertools import groupby
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.batch import Batch, Sequences
from worker.batching.cost import BatchCost, LengthBuckets
from worker.batching.pool import (
    LEAD_SECONDS,
    MAX_INTERACTIVE_IN_ROW,
    SHORT_BULK_SECONDS,
    TOKENIZING_SECONDS,
    BatchLimits,
    SequencePool,
    find_hold_end,
)
from worker.encoder.padding import pad_batch

Waiting = tuple[int, int, int]  # request, position, length


class PlainPool:
    """Takes batches as SequencePool promises, without any haste."""

    def __init__(self, limits: BatchLimits, cost: BatchCost) -> None:
        self.limits, self.cost = limits, cost
        self.waiting: dict[bool, list[Waiting]] = {True: [], False: []}  # interactive ones, and bulk
        self.saved = float(limits.max_saved_tokens)
        self.num_in_row = 0
        self.factor = limits.square_factor if cost.weigh(2) > 2 else 1.0

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
            computed, padding, of_token = self.measure(batch)
            self.saved = min(
                self.saved + self.mean_share(batch) * computed - padding, limits.max_saved_tokens * of_token
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
            for length, same in groupby(candidates, key=lambda each: each[2]):
                some, before = list(same), len(batch)
                for candidate in some:
                    if not self.fits([*batch, candidate], budget):
                        break
                    batch.append(candidate)
                num_fitting = len(batch) - before
                if waiting is self.waiting[False] and (before or num_fitting < len(some)):
                    tile = max(1, self.cost.tile_tokens // length)
                    if before or num_fitting >= tile:
                        del batch[len(batch) - num_fitting % tile :]
                for candidate in batch[before:]:
                    waiting.remove(candidate)
                if num_fitting < len(some):
                    break

    def fits(self, batch: list[Waiting], budget: float) -> bool:
        lengths = [length for *_, length in batch]
        alone = sum(map(self.cost.of_sequence, lengths))
        if len(batch) == 1:
            return True
        if self.cost.of_batch(len(batch), max(lengths), alone) > budget:
            return False
        computed, padding, of_token = self.measure(batch)
        limits = self.limits
        allowed = max(limits.min_padding_tokens * of_token, self.factor * limits.max_padding_share * computed)
        return not self.cost.pads or padding <= min(allowed, self.saved + self.mean_share(batch) * computed)

    def measure(self, batch: list[Waiting]) -> tuple[int, int, float]:
        """Return what is computed of a batch, what of that is padding, and what one token counts."""
        weights = [self.cost.weigh(length) for *_, length in batch]
        longest = max(length for *_, length in batch)
        return max(weights) * len(batch), max(weights) * len(batch) - sum(weights), max(weights) / longest

    def mean_share(self, batch: list[Waiting]) -> float:
        longest = max(length for *_, length in batch)
        return max(0.0, self.factor * self.limits.mean_padding_share - self.cost.padding_share(longest))


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
    lambda: BatchCost(1024),  # powers of two: both sum without rounding
    lambda: BatchCost(1024, pads=False),
    lambda: BatchCost(1024, LengthBuckets(512)),
    lambda: BatchCost(1024, LengthBuckets(512), pads=False, tile_tokens=128),
    lambda: BatchCost(1024, holds_squares=True),
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
        square_factor=1.5,
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
    drained = sorted((request, positions.tolist()) for request, positions in pool.drain())
    assert drained == [(1, [0]), (1, [2]), (2, [7])]
    assert len(pool) == 0


def test_bulk_that_fills_no_tile_waits_for_more_of_its_length_and_queries_do_not_wait() -> None:
    pool = SequencePool(BatchLimits(100), BatchCost(pads=False, tile_tokens=30))
    pool.add(1, [10] * 4 + [6] * 7)
    assert pool.take_batch().lengths.tolist() == [10] * 4 + [6] * 5, "the first, and whole tiles of others"
    pool.add(2, [6] * 3 + [5] * 4)
    assert pool.take_batch().lengths.tolist() == [6] * 5, "a later request completes a tile"
    pool.add(3, [6, 5], is_interactive=True)
    assert pool.take_batch().lengths.tolist() == [6, 5]
    assert pool.take_batch().lengths.tolist() == [5] * 4, "nothing else waits"


def test_the_budget_can_change_while_sequences_wait_and_can_depend_on_the_longest() -> None:
    pool = SequencePool(BatchLimits(1000))
    pool.add(1, [100] * 6 + [10] * 6)
    pool.budget = lambda max_length: 200 if max_length > 50 else 30
    assert [len(pool.take_batch()) for _ in range(5)] == [2, 2, 2, 3, 3]


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
            while len(pool.take_batch()):
                pass
        finally:
            sys.settrace(earlier)
        return num_lines

    assert count_lines(8) < 6 * count_lines(2)


def test_a_batch_knows_its_prompts_and_is_padded_to_the_bucket_of_its_longest() -> None:
    batch = Batch.from_ids([np.arange(1, 34, dtype=np.int32), np.arange(1, 21, dtype=np.int32)], [1, 0])
    assert (len(batch), batch.num_tokens, batch.num_padded_tokens, batch.max_length) == (2, 53, 66, 33)
    assert batch.prompt_lengths is not None
    assert batch.prompt_lengths.tolist() == [1, 0]
    padded = pad_batch(batch, 0, LengthBuckets(8192))
    assert padded.input_ids.shape == padded.attention_mask.shape == padded.pool_mask.shape == (2, 34)
    assert padded.attention_mask.sum(axis=1).tolist() == [33, 20]
    assert padded.pool_mask.sum(axis=1).tolist() == [32, 20]


def test_buckets_are_few_hold_their_texts_and_are_no_longer_than_the_model_reads() -> None:
    known = {1: 1, 32: 32, 33: 34, 63: 64, 64: 64, 65: 68, 129: 136, 255: 256, 257: 272}
    assert {num_tokens: LengthBuckets(8192).find(num_tokens) for num_tokens in known} == known
    for longest in (1, 100, 8192):
        buckets = LengthBuckets(longest)
        for num_tokens in range(1, 8193):
            length = buckets.find(num_tokens)
            assert num_tokens <= length <= max(num_tokens, longest)
            assert length < num_tokens * (1 + 1 / 16)
            assert buckets.find(length) == length, "what is in its bucket stays"
    found = [LengthBuckets(8192).find(num_tokens) for num_tokens in range(1, 8193)]
    assert len(set(found)) <= 16 * 10  # ten doublings from 8 to 8,192 and, before, every length
    assert sum(found) / sum(range(1, 8193)) <= 1.025


BUDGET = 1000
SECONDS = 0.1  # of a full batch


@pytest.fixture
def pool() -> SequencePool:
    """A pool of which one full batch was just sent, at moment 0, and whose pace is known."""
    pool = SequencePool(BatchLimits(BUDGET))
    for moment in (-SECONDS, 0.0):
        pool.add(int(10 * moment), [100] * 10)
        batch = pool.take(moment, is_runner_idle=moment < 0)
        assert len(batch) == 10
        if moment < 0:
            pool.note_encoded(batch, SECONDS, 0.0)
    return pool


def test_bulk_that_does_not_fill_a_batch_is_held_until_the_runner_is_about_to_be_idle(
    pool: SequencePool,
) -> None:
    pool.add(1, [100] * 4)
    assert not len(pool.take(0.01, is_runner_idle=False))
    assert pool.hold_end == SECONDS - LEAD_SECONDS
    pool.add(2, [100] * 4)
    assert not len(pool.take(0.05, is_runner_idle=False))
    assert len(pool.take(SECONDS - LEAD_SECONDS, is_runner_idle=False)) == 8
    assert not pool.hold_end
    pool.add(3, [100] * 6)
    assert not len(pool.take(0.1, is_runner_idle=False))
    pool.add(4, [100] * 6)
    assert len(pool.take(0.11, is_runner_idle=False)) == 10, "it fills a batch"
    assert len(pool.take(0.12, is_runner_idle=True)) == 2, "an idle runner gets what there is"


def test_an_idle_runner_waits_a_little_for_requests_that_are_being_tokenized(pool: SequencePool) -> None:
    pool.num_tokenizing = 6
    for request in range(5):
        pool.add(request, [10])
        assert not len(pool.take(5.0 + request * TOKENIZING_SECONDS / 5, is_runner_idle=True))
        assert pool.hold_end == pytest.approx(5.0 + TOKENIZING_SECONDS), "no longer for each of them"
    assert len(pool.take(5.0 + TOKENIZING_SECONDS, is_runner_idle=True)) == 5


def test_an_interactive_request_never_waits_and_bulk_batches_are_short_while_such_come(
    pool: SequencePool,
) -> None:
    pool.num_tokenizing = 1
    pool.add(1, [100])
    pool.add(2, [100], is_interactive=True)
    assert pool.take(0.01, is_runner_idle=False).requests.tolist() == [2]
    pool.remove(1)
    pool.num_tokenizing = 0
    pool.add(3, [10] * 1000)
    for num_started in (1, 2):  # behind or beside another one a batch takes twice as long
        pool.num_started, pool.interactive_at = num_started, 0.02
        expected = BUDGET * SHORT_BULK_SECONDS / SECONDS / 10 / num_started
        assert len(pool.take(0.03, is_runner_idle=False)) == pytest.approx(expected, abs=1)
    assert len(pool.take(100.0, is_runner_idle=False)) == 100
    one = Sequences(np.zeros(1, np.int64), np.zeros(1, np.int32), np.array([10], np.int32), np.array([10.0]))
    pool.note_encoded(one, 60.0, 100.0)  # a machine that stood still
    pool.interactive_at = 100.0
    assert len(pool.take(100.1, is_runner_idle=False)) * 10 == pytest.approx(BUDGET / 8, abs=10), "never tiny"


def test_nothing_is_held_before_the_pace_is_known_and_an_empty_pool_asks_for_no_moment() -> None:
    pool = SequencePool(BatchLimits(BUDGET))
    pool.add(1, [100] * 10)
    pool.add(2, [100])
    assert len(pool.take(0.0, is_runner_idle=True)) == 10
    assert len(pool.take(0.0, is_runner_idle=False)) == 1
    pool.num_tokenizing = 1
    pool.add(3, [100])
    assert not len(pool.take(0.01, is_runner_idle=False))
    pool.remove(3)
    assert not len(pool.take(0.02, is_runner_idle=False))
    assert pool.hold_end is None


@pytest.mark.parametrize(
    ("num_waiting", "num_tokenizing", "expected", "reason"),
    [
        (100, 0, 8, "there is a full batch for each of four streams"),
        (16, 0, 4, "each gets a quarter of what is left"),
        (6, 0, 2, "but nothing smaller than a quarter of a full one"),
        (16, 1, 8, "more will come in a moment"),
    ],
)
def test_the_last_bulk_is_shared_out_so_that_streams_end_together(
    num_waiting: int, num_tokenizing: int, expected: int, reason: str
) -> None:
    pool = SequencePool(BatchLimits(8 * 128))
    pool.num_started = pool.num_streams = 4
    pool.num_tokenizing = num_tokenizing
    pool.add(0, [128] * num_waiting)
    assert len(pool.take(0.0, is_runner_idle=True)) == expected, reason


@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 0.3), st.lists(st.integers(1, 200), min_size=1, max_size=30), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    seconds_per_token=st.floats(1e-6, 1e-3),
    num_tokenizing=st.integers(0, 2),
)
def test_a_runner_never_stands_still_for_long_while_sequences_wait(
    arrivals: list[tuple[float, list[int], bool]], seconds_per_token: float, num_tokenizing: int
) -> None:
    """An executor and its runner, with a clock of their own: two batches ahead, requests that come at any moment."""
    pool = SequencePool(BatchLimits(BUDGET))
    pool.num_tokenizing = num_tokenizing
    arrivals = sorted(arrivals)
    ahead: list[tuple[float, float, Sequences]] = []  # end, seconds, sequences
    now, idle_since = 0.0, 0.0
    while arrivals or ahead or len(pool):
        while arrivals and arrivals[0][0] <= now:
            _, lengths, is_interactive = arrivals.pop(0)
            idle_since = idle_since if len(pool) or ahead else now
            pool.add(len(arrivals), lengths, is_interactive=is_interactive)
        while ahead and ahead[0][0] <= now:
            _, seconds, sequences = ahead.pop(0)
            pool.note_encoded(sequences, seconds, now)
            idle_since = now
        while len(ahead) < 2 and len(batch := pool.take(now, is_runner_idle=not ahead)):
            seconds = pool.cost_of(batch) * seconds_per_token
            ahead.append(((ahead[-1][0] if ahead else now) + seconds, seconds, batch))
        if len(pool) and not ahead:
            assert now - idle_since <= TOKENIZING_SECONDS
        moments = [ahead[0][0]] if ahead else []
        moments += [arrivals[0][0]] if arrivals else []
        moments += [pool.hold_end] if pool.hold_end is not None and len(ahead) < 2 else []
        assert moments or not len(pool)
        now = max(now, min(moments, default=now))


@pytest.mark.parametrize(
    ("free_at", "held_since", "is_tokenizing", "expected"),
    [
        (10.0, 3.0, False, 10.0 - LEAD_SECONDS),  # waiting costs nothing until then
        (10.0, 3.0, True, 10.0 + TOKENIZING_SECONDS),  # the device stands still for a moment
        (1.0, 3.0, True, 3.0 + TOKENIZING_SECONDS),  # it stood still before
        (1.0, 3.0, False, 1.0 - LEAD_SECONDS),  # nothing to wait for
    ],
)
def test_a_batch_is_held_as_long_as_waiting_is_cheap(
    free_at: float, held_since: float, is_tokenizing: bool, expected: float
) -> None:
    assert find_hold_end(free_at, held_since, is_tokenizing=is_tokenizing) == expected
