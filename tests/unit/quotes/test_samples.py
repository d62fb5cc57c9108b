"""What a sample says of all rows, and the arithmetic of intervals."""

import statistics
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from tests.protocol import SPEC
from vectormill.jobs.item import Items
from vectormill.quotes.figure import Figure
from vectormill.quotes.quote import find_queue, measure_rate
from vectormill.quotes.sample import MOST_HASHES, MOST_ROWS, TextSample
from vectormill.workers.workers import Worker

RATE = Figure(100, 50, 200)


def sample(texts: list[bytes]) -> TextSample:
    found = TextSample()
    for start in range(0, len(texts), 700):
        part = texts[start : start + 700]
        found.add_all(Items([str(start + row) for row in range(len(part))], part, [b""] * len(part)))
    return found


def test_few_rows_are_all_in_the_sample_and_repeats_are_counted() -> None:
    found = sample([b"one", b"two", b"one", b"one"])
    assert (found.is_whole, found.num_rows, len(found.items)) == (True, 4, 4)
    assert found.repeated == Figure.exact(0.5)
    assert found.mean_bytes == (1, 3, 0)


def test_of_many_rows_each_is_as_likely_to_be_in_the_sample() -> None:
    number = 50_000
    found = sample([f"{row:06}".encode() for row in range(number)])
    places = [int(item.text) for item in found.items]
    assert (found.is_whole, found.num_rows, len(set(places))) == (False, number, MOST_ROWS)
    # Of uniform places the mean is normal with this deviation; four of them are left by one seed of 16,000.
    deviation = number / 12**0.5 / MOST_ROWS**0.5
    assert abs(statistics.mean(places) - number / 2) < 4 * deviation
    quarters = [sum(place // (number // 4) == quarter for place in places) for quarter in range(4)]
    assert all(abs(count - MOST_ROWS / 4) < 4 * (MOST_ROWS * 3 / 16) ** 0.5 for count in quarters)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_the_share_of_repeated_texts_is_found_among_more_than_can_be_kept(share: float) -> None:
    number = 5 * MOST_HASHES
    num_distinct = round(number * (1 - share))
    found = sample([f"text {row % num_distinct}".encode() for row in range(number)]).repeated
    assert found.least - 0.001 <= share <= found.most + 0.001
    assert found.most - found.least < 0.04


def test_an_interval_of_a_share_holds_it_as_often_as_it_says() -> None:
    assert Figure.of_share(0, 2000, is_whole=False).most == pytest.approx(0.0019, abs=0.0001)
    middle = Figure.of_share(500, 2000, is_whole=False)
    assert (middle.least, middle.most) == pytest.approx((0.2315, 0.2694), abs=0.0002)
    assert Figure.of_share(1, 4, is_whole=True) == Figure.exact(0.25)


def test_intervals_are_multiplied_and_divided_by_their_ends() -> None:
    assert Figure(10, 8, 12) * Figure(2, 1, 3) == Figure(20, 8, 36)
    assert Figure(1000, 800, 1200) / RATE == Figure(10, 4, 24)
    assert Figure(0.25, 0.2, 0.5).rest == Figure(0.75, 0.5, 0.8)


def worker(model: str = SPEC.model, slots: int = 4, **report: Any) -> Worker:
    now = datetime.now(UTC)
    return Worker("w", uuid4(), model, slots, report, now, now)


def test_the_rate_is_that_of_live_workers_of_the_model_while_they_held_chunks() -> None:
    busy = worker(num_tokens=6000, stage_seconds={"held": 60.0, "run": 30.0})
    twice = worker(num_tokens=12000, stage_seconds={"held": 60.0})
    others = [worker("another", num_tokens=9e9, stage_seconds={"held": 9.0}), worker(slots=0, num_tokens=9e9)]
    rate, how = measure_rate([busy, twice, *others], SPEC)
    assert rate is not None
    assert (rate.value, "2 live workers" in how) == (300, True)
    assert rate.least < 300 < rate.most
    new = worker()  # is taken for as fast as the mean of the others
    assert getattr(measure_rate([busy, twice, new], SPEC)[0], "value", None) == 450
    rate, how = measure_rate([new, *others], SPEC)
    assert (rate, "No live worker has measured" in how) == (None, True)


def test_more_urgent_jobs_come_first_and_others_take_turns() -> None:
    own = Figure.exact(1000)
    waiting = find_queue([(2, 10, 50.0), (5, 100, 300.0), (5, 1, 200.0)], 5, own, RATE)
    # 500 tokens first; then as many of the large job as the own has, and all of the small one.
    assert waiting.value == (500 + 1000 + 200) / 100
    assert (waiting.least, waiting.most) == (500 / 200, (500 + 30_000 + 200) / 50)
    assert find_queue([], 5, own, RATE) == Figure.exact(0)
