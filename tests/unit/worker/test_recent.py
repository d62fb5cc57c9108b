"""The last ten minutes of a worker, on a clock that the test moves."""

from vectormill.workers.samples import MOST_SAMPLES, Sample, read_samples
from worker.devices.detect import DeviceUse
from worker.report import GAP_SECONDS, Recent

GIB = 1 << 30


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_sample_is_taken_of_every_ten_seconds_however_often_reports_are_made() -> None:
    clock = Clock()
    recent = Recent(clock)
    for number in range(1, 5):
        clock.now += 5
        recent.note(1000 * number, DeviceUse(2 * GIB, 8 * GIB, 0.2 * number))
    clock.now += 1
    assert read_samples({"recent": recent.write()}) == [
        Sample(11.0, 200, 2048, 30),  # the mean of 20 % and 40 %
        Sample(1.0, 200, 2048, 70),
    ]


def test_what_a_device_does_not_say_is_unknown_and_the_rate_is_told_all_the_same() -> None:
    clock = Clock()
    recent = Recent(clock)
    clock.now += 20
    recent.note(500, DeviceUse(None, 8 * GIB, None))
    assert read_samples({"recent": recent.write()}) == [Sample(0.0, 25, None, None)]


def test_ten_minutes_are_kept_and_no_more() -> None:
    clock = Clock()
    recent = Recent(clock)
    for number in range(3 * MOST_SAMPLES):
        clock.now += 10
        recent.note(1000 * number * number, DeviceUse(GIB, 8 * GIB, 0.5))
    kept = read_samples({"recent": recent.write()})
    assert len(kept) == MOST_SAMPLES
    assert (kept[0].seconds_ago, kept[-1].seconds_ago) == (10.0 * (MOST_SAMPLES - 1), 0.0)
    assert kept[-1].tokens_per_second > kept[0].tokens_per_second


def test_after_a_gap_the_samples_begin_anew() -> None:
    clock = Clock()
    recent = Recent(clock)
    for seconds in (10, 10, GAP_SECONDS + 1):
        clock.now += seconds
        recent.note(0, DeviceUse(GIB, 8 * GIB, 0.5))
    assert len(read_samples({"recent": recent.write()})) == 1
