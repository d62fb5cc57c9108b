"""Tests of the counters that a worker reports of its chunks: outcomes, waits and the time they are held."""

from contextlib import ExitStack
from uuid import UUID

import pytest

from worker.chunk.counts import Histogram, Timesheet


@pytest.mark.parametrize(
    ("value", "place"),
    [(0.0, 0), (0.5, 0), (0.51, 1), (2.0, 1), (2.1, 2)],  # a bound belongs to its bucket, as Prometheus says
)
def test_a_value_is_counted_in_the_bucket_of_the_first_bound_that_is_not_below_it(
    value: float, place: int
) -> None:
    histogram = Histogram((0.5, 2))
    histogram.add(value)
    told = histogram.describe()
    assert told["counts"] == [int(index == place) for index in range(3)]
    assert (told["bounds"], told["sum"]) == ([0.5, 2], value)


JOB, OTHER = UUID(int=1), UUID(int=2)


class Clocks:
    """A clock, and a device that computes half of the time."""

    def __init__(self) -> None:
        self.now = 100.0

    def device_seconds(self) -> float:
        return self.now / 2


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def sheet(clocks: Clocks) -> Timesheet:
    return Timesheet(clocks.device_seconds, lambda: clocks.now)


def test_chunks_that_overlap_are_held_once_and_each_second_is_taken_once(
    sheet: Timesheet, clocks: Clocks
) -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(sheet.hold(JOB))
        clocks.now += 4
        second.enter_context(sheet.hold(JOB))
        clocks.now += 2
        assert sheet.take(JOB) == {"held": 6.0, "device": 3.0}
        first.close()
        clocks.now += 2
        assert sheet.take(JOB) == {"held": 2.0, "device": 1.0}
        assert sheet.take(JOB) == {"held": 0.0, "device": 0.0}


def test_the_time_in_which_threads_waited_for_a_core_is_taken_with_the_others(clocks: Clocks) -> None:
    sheet = Timesheet(clocks.device_seconds, lambda: clocks.now, lambda: clocks.now / 4)
    with sheet.hold(JOB):
        clocks.now += 8
        assert sheet.take(JOB) == {"held": 8.0, "device": 4.0, "starved": 2.0}
    assert sheet.totals()["starved"] == 2.0


def test_a_job_that_comes_back_is_not_charged_for_the_time_between(sheet: Timesheet, clocks: Clocks) -> None:
    with sheet.hold(JOB):
        clocks.now += 1
    clocks.now += 50
    with sheet.hold(JOB):
        clocks.now += 1
        assert sheet.take(JOB)["held"] == 1.0


def test_jobs_side_by_side_each_hold_their_own_time_and_the_worker_holds_it_once(
    sheet: Timesheet, clocks: Clocks
) -> None:
    with sheet.hold(JOB):
        clocks.now += 1
        with sheet.hold(OTHER):
            clocks.now += 2
            assert (sheet.take(JOB)["held"], sheet.take(OTHER)["held"]) == (3.0, 2.0)
    clocks.now += 10
    assert sheet.totals() == {"held": 3.0, "device": 1.5}


def test_what_is_known_too_late_is_counted_with_the_jobs_next_chunk(sheet: Timesheet, clocks: Clocks) -> None:
    with sheet.hold(JOB):
        sheet.carry(JOB, "persist", 0.25)
        assert sheet.take(JOB) == {"held": 0.0, "device": 0.0, "persist": 0.25}
        assert "persist" not in sheet.take(JOB)
    sheet.count({"persist": 1.0})
    assert sheet.totals()["persist"] == 1.25


def test_a_chunk_that_fails_does_not_hold_its_job_for_ever(sheet: Timesheet, clocks: Clocks) -> None:
    with pytest.raises(ValueError, match="bad"), sheet.hold(JOB):
        raise ValueError("bad")
    clocks.now += 5
    assert sheet.totals() == {"held": 0.0, "device": 0.0}
