"""A sample is projected to all rows, and intervals are computed with."""

import statistics

import pytest

from vectormill.domain.encoding import DEFAULT_MODEL, PASSAGES, EncodingOptions
from vectormill.domain.vector_type import DEFAULT_IN_COLLECTION, DEFAULT_TYPE
from vectormill.jobs.item import Item, Items
from vectormill.models.registry import Registry, make_spec
from vectormill.quotes import quote as quoting
from vectormill.quotes.estimate import Estimate
from vectormill.quotes.quote import (
    FEW_POWER,
    LEAST_FACTOR,
    MOST_FACTOR,
    Speed,
    Workload,
    estimate_sizes,
    find_queue,
    fit_speed,
)
from vectormill.quotes.sample import KEPT_BYTES, MOST_HASHES, MOST_ROWS, TextSample

RATE = Estimate(100, 50, 200)


def sample(texts: list[bytes]) -> TextSample:
    found = TextSample()
    for start in range(0, len(texts), 700):
        part = texts[start : start + 700]
        found.add_all(Items([str(start + row) for row in range(len(part))], part, [b""] * len(part)))
    return found


def test_few_rows_are_all_in_the_sample_and_repeats_are_counted() -> None:
    found = sample([b"one", b"two", b"one", b"one"])
    assert (found.is_whole, found.num_rows, len(found.drawn)) == (True, 4, 4)
    assert found.repeated == Estimate.exact(0.5)
    assert found.mean_bytes == (1, 3, 0)


def test_of_long_texts_only_the_beginning_is_kept_with_their_length_and_hash() -> None:
    text = b"long " * KEPT_BYTES
    (row,) = sample([text]).drawn
    assert (row.text, row.num_bytes) == (text[:KEPT_BYTES], len(text))
    assert row.content_hash == Item("", text).content_hash()


@pytest.mark.parametrize("step", [1, -1])
def test_of_texts_in_the_order_of_their_length_random_ones_are_counted(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Registry({}).card(DEFAULT_MODEL)
    spec = make_spec(card, EncodingOptions(long_texts=PASSAGES))
    drawn = sample([b"word " * (10 + 4 * number) for number in range(400)][::step]).drawn
    whole = quoting.count_tokens(card, spec, drawn)
    assert (len(whole.num_tokens), int(whole.num_estimated.sum())) == (400, 0)
    monkeypatch.setattr(quoting, "MOST_BYTES", 400_000)
    some = quoting.count_tokens(card, spec, drawn)
    assert 50 < len(some.num_tokens) < 150
    assert some.num_tokens.mean() == pytest.approx(whole.num_tokens.mean(), rel=0.2)
    assert some.is_long.mean() == pytest.approx(whole.is_long.mean(), abs=0.1)


def test_of_many_rows_each_is_as_likely_to_be_in_the_sample() -> None:
    number = 50_000
    found = sample([f"{row:06}".encode() for row in range(number)])
    places = [int(item.text) for item in found.drawn]
    assert (found.is_whole, found.num_rows, len(set(places))) == (False, number, MOST_ROWS)
    # The mean of uniform places is normally distributed with this deviation; one seed of 16,000 leaves four deviations.
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
    assert Estimate.of_share(0, 2000, is_whole=False).most == pytest.approx(0.0019, abs=0.0001)
    middle = Estimate.of_share(500, 2000, is_whole=False)
    assert (middle.least, middle.most) == pytest.approx((0.2315, 0.2694), abs=0.0002)
    assert Estimate.of_share(1, 4, is_whole=True) == Estimate.exact(0.25)


def test_intervals_are_multiplied_and_divided_by_their_ends() -> None:
    assert Estimate(10, 8, 12) * Estimate(2, 1, 3) == Estimate(20, 8, 36)
    assert Estimate(1000, 800, 1200) / RATE == Estimate(10, 4, 24)
    assert Estimate(0.25, 0.2, 0.5).rest == Estimate(0.75, 0.5, 0.8)


def test_the_costs_of_a_text_and_of_a_token_are_found_from_jobs_of_different_lengths() -> None:
    jobs = [(texts, texts * length, texts * (0.001 + length * 0.0001)) for texts, length in (
        (2000, 10), (1000, 100), (700, 250), (5000, 40), (3000, 60),
    )]  # fmt: skip
    speed = fit_speed([*jobs, (1, 5, 0.9)], 2)  # the last one only waited
    assert speed is not None
    assert (speed.text_seconds, speed.token_seconds) == pytest.approx((0.001, 0.0001))
    assert (speed.num_workers, speed.factor) == (2, LEAST_FACTOR)
    assert speed.find_seconds(1000, 20_000) == pytest.approx((1 + 2) / 2)
    rate = speed.find_rate(90)
    assert (rate.value, rate.most / rate.least) == pytest.approx((90 / 0.01 * 2, LEAST_FACTOR**2))
    slow = fit_speed([*jobs, (1000, 100_000, 33.0)], 2)
    assert slow is not None
    assert slow.factor > 1.5, "a job that took three times as long was measured too"


@pytest.mark.parametrize(("texts", "tokens", "seconds"), [(2, 10, 900.0), (90_000, 9_000_000, 1.1)])
def test_a_job_that_stood_still_or_had_no_work_makes_no_interval_useless(
    texts: int, tokens: int, seconds: float
) -> None:
    jobs = [(100.0 * number, 2000.0 * number, 3.0 * number) for number in range(1, 20)]
    speed = fit_speed([*jobs, (texts, tokens, seconds)], 1)
    assert speed is not None
    rate = speed.find_rate(20)
    assert 2000 / 3 / 2 < rate.least < 2000 / 3 < rate.most < 2000 / 3 * 4
    wild = fit_speed([(100, 2000, 10.0**number) for number in range(1, 8)], 1)
    assert wild is not None
    assert wild.factor > MOST_FACTOR, "nothing can be told"


def test_few_or_odd_measurements_give_a_wide_interval_and_no_negative_cost() -> None:
    one = fit_speed([(100, 1000, 10.0)], 1)
    assert one is not None
    assert (one.text_seconds, one.token_seconds) == (0.0, 0.01)
    assert one.factor == pytest.approx(LEAST_FACTOR**FEW_POWER)
    odd = fit_speed([(100, 1000, 20.0), (100, 2000, 10.0), (200, 2000, 40.0)], 1)
    assert odd is not None
    assert min(odd.text_seconds, odd.token_seconds) == 0 < max(odd.text_seconds, odd.token_seconds)
    assert fit_speed([(100, 1000, 0.5), (0, 0, 60.0)], 1) is None


def test_scores_have_no_index_and_no_time_is_told_without_a_rate() -> None:
    rows = Estimate.exact(1000)
    scores = estimate_sizes(Workload(rows, rows, DEFAULT_TYPE, 3, 100, has_vectors=False), None, 4)
    vectors = estimate_sizes(Workload(rows, rows, DEFAULT_TYPE, 3, 100), RATE, 4)
    assert (scores["index_bytes"], scores["index_seconds"], scores["seconds"]) == (None, None, None)
    assert scores["index_reason"]
    assert not vectors["index_reason"]
    assert scores["rows_bytes"] == vectors["rows_bytes"]
    assert vectors["seconds"].value == pytest.approx(1e6 / 100, rel=0.01)
    assert vectors["index_bytes"].value > 1000 * (3 * 4 + 32 * 16)


def test_more_urgent_jobs_come_first_and_others_take_turns() -> None:
    speed = Speed(0.0, 0.01, 1, 2.0)
    waiting = find_queue(
        [(2, 10, 50.0), (5, 100, 300.0), (5, 1, 200.0), (5, 9, None)], 5, Estimate.exact(10), speed
    )
    # Five seconds first; then as many of the large job as the own has, and all of the small one.
    assert waiting.value == pytest.approx(5 + 10 + 2)
    assert (waiting.least, waiting.most) == pytest.approx((5 / 2, (5 + 300 + 2) * 2))
    assert find_queue([], 5, Estimate.exact(10), speed) == Estimate.exact(0)


def test_the_estimate_of_an_index_holds_what_builds_took() -> None:
    """The builds of benchmarks/README.md, "Millions of rows", and of docs/INDEXES.md."""
    for num_rows, graph, cores, seconds in (
        (20_000, (16, 64), 1, 34),
        (200_000, (16, 128), 2, 261),
        (100_000, (8, 32), 2, 20.8),
        (5_000_000, (8, 32), 2, 1250),
    ):
        load = Workload(
            Estimate.exact(num_rows), Estimate.exact(17), DEFAULT_IN_COLLECTION, 384, 80, graph=graph
        )
        told = estimate_sizes(load, None, cores)["index_seconds"]
        assert told.least < seconds < told.most, (num_rows, graph)
        assert told.most < 2.5 * told.least, "an interval that holds everything tells nothing"
