"""When the runner gets its next batch: the moments are the test's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.feed import (
    LEAD_SECONDS,
    SHORT_BULK_SECONDS,
    TOKENIZING_SECONDS,
    Feed,
    find_hold_end,
)
from worker.batching.limits import BatchLimits
from worker.batching.pool import SequencePool
from worker.batching.sequences import Sequences

BUDGET = 1000
SECONDS = 0.1  # of a full batch


@pytest.fixture
def pool() -> SequencePool:
    return SequencePool(BatchLimits(BUDGET))


@pytest.fixture
def feed(pool: SequencePool) -> Feed:
    """At moment 0 one full batch was just sent, and the pace is known."""
    feed = Feed(pool)
    for moment in (-SECONDS, 0.0):
        pool.add(int(10 * moment), [100] * 10)
        batch = feed.take(moment, is_runner_idle=moment < 0)
        assert len(batch) == 10
        if moment < 0:
            feed.note_encoded(batch, SECONDS, 0.0)
    return feed


def test_a_full_batch_is_sent_though_the_runner_is_busy(feed: Feed, pool: SequencePool) -> None:
    pool.add(1, [100] * 10)
    assert len(feed.take(0.0, is_runner_idle=False)) == 10


def test_bulk_that_does_not_fill_a_batch_is_held_until_the_runner_is_about_to_be_idle(
    feed: Feed, pool: SequencePool
) -> None:
    pool.add(1, [100] * 4)
    assert not len(feed.take(0.01, is_runner_idle=False))
    assert feed.hold_end == SECONDS - LEAD_SECONDS
    pool.add(2, [100] * 4)
    assert not len(feed.take(0.05, is_runner_idle=False))
    assert len(feed.take(SECONDS - LEAD_SECONDS, is_runner_idle=False)) == 8
    assert feed.hold_end is None


def test_what_was_held_is_sent_as_soon_as_it_fills_a_batch(feed: Feed, pool: SequencePool) -> None:
    pool.add(1, [100] * 6)
    assert not len(feed.take(0.01, is_runner_idle=False))
    pool.add(2, [100] * 6)
    assert len(feed.take(0.02, is_runner_idle=False)) == 10


def test_an_idle_runner_gets_what_there_is(feed: Feed, pool: SequencePool) -> None:
    pool.add(1, [100])
    assert len(feed.take(0.01, is_runner_idle=True)) == 1


def test_an_idle_runner_waits_a_little_for_a_request_that_is_being_tokenized(
    feed: Feed, pool: SequencePool
) -> None:
    feed.num_tokenizing = 1
    pool.add(1, [100])
    assert not len(feed.take(5.0, is_runner_idle=True))
    assert feed.hold_end == pytest.approx(5.0 + TOKENIZING_SECONDS)
    assert not len(feed.take(5.0 + TOKENIZING_SECONDS / 2, is_runner_idle=True))
    assert len(feed.take(5.0 + TOKENIZING_SECONDS, is_runner_idle=True)) == 1


def test_texts_that_are_tokenized_one_after_another_do_not_add_up_to_a_longer_wait(
    feed: Feed, pool: SequencePool
) -> None:
    feed.num_tokenizing = 6
    for request in range(5):
        pool.add(request, [10])
        assert not len(feed.take(5.0 + request * TOKENIZING_SECONDS / 5, is_runner_idle=True))
    assert len(feed.take(5.0 + TOKENIZING_SECONDS, is_runner_idle=True)) == 5


def test_an_interactive_request_never_waits(feed: Feed, pool: SequencePool) -> None:
    feed.num_tokenizing = 1
    pool.add(1, [100])
    pool.add(2, [100], is_interactive=True)
    assert feed.take(0.01, is_runner_idle=False).requests.tolist() == [2]


@pytest.mark.parametrize("num_started", [1, 2])
def test_bulk_batches_are_short_while_interactive_requests_come(
    feed: Feed, pool: SequencePool, num_started: int
) -> None:
    """Beside another one a batch takes twice as long; behind another one it waits as long again."""
    feed.num_started = num_started
    pool.add(1, [10] * 1000)
    assert len(feed.take(0.01, is_runner_idle=False)) == 100
    feed.note_interactive(0.02)
    expected = BUDGET * SHORT_BULK_SECONDS / SECONDS / 10 / num_started
    assert len(feed.take(0.03, is_runner_idle=False)) == expected
    assert len(feed.take(100.0, is_runner_idle=False)) == 100


def test_short_bulk_batches_are_never_tiny(feed: Feed, pool: SequencePool) -> None:
    pool.add(1, [10] * 1000)
    one = Sequences(np.zeros(1, np.int64), np.zeros(1, np.int32), np.array([10], np.int32), np.array([10.0]))
    feed.note_encoded(one, 60.0, 0.01)  # a machine that stood still
    feed.note_interactive(0.02)
    assert len(feed.take(0.03, is_runner_idle=False)) * 10 == pytest.approx(BUDGET / 8, abs=10)


def test_nothing_is_held_before_the_pace_is_known(pool: SequencePool) -> None:
    feed = Feed(pool)
    pool.add(1, [100] * 10)
    pool.add(2, [100])
    assert len(feed.take(0.0, is_runner_idle=True)) == 10
    assert len(feed.take(0.0, is_runner_idle=False)) == 1


def test_an_empty_pool_asks_for_no_moment(feed: Feed, pool: SequencePool) -> None:
    pool.add(1, [100])
    assert not len(feed.take(0.01, is_runner_idle=False))
    pool.remove(1)
    assert not len(feed.take(0.02, is_runner_idle=False))
    assert feed.hold_end is None


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
    feed = Feed(pool)
    feed.num_tokenizing = num_tokenizing
    arrivals = sorted(arrivals)
    ahead: list[tuple[float, float, Sequences]] = []  # end, seconds, sequences
    now, idle_since, num_taken = 0.0, 0.0, 0
    while arrivals or ahead or len(pool):
        while arrivals and arrivals[0][0] <= now:
            _, lengths, is_interactive = arrivals.pop(0)
            idle_since = idle_since if len(pool) or ahead else now
            pool.add(len(arrivals), lengths, is_interactive=is_interactive)
        while ahead and ahead[0][0] <= now:
            _, seconds, sequences = ahead.pop(0)
            feed.note_encoded(sequences, seconds, now)
            idle_since = now
        while len(ahead) < 2 and len(batch := feed.take(now, is_runner_idle=not ahead)):
            num_taken += len(batch)
            seconds = pool.cost_of(batch) * seconds_per_token
            ahead.append(((ahead[-1][0] if ahead else now) + seconds, seconds, batch))
        if len(pool) and not ahead:
            assert now - idle_since <= TOKENIZING_SECONDS
        moments = [ahead[0][0]] if ahead else []
        moments += [arrivals[0][0]] if arrivals else []
        moments += [feed.hold_end] if feed.hold_end is not None and len(ahead) < 2 else []
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
