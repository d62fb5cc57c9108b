import pytest

from benchmarks.probes.alongside import Alongside
from benchmarks.probes.peak import PeakSampler


class Counter(Alongside):
    """Counts its own ends."""

    def __init__(self) -> None:
        super().__init__("counter")
        self.num_ended = 0

    def run(self) -> None:
        self.is_over.wait()
        self.num_ended += 1


def test_what_goes_on_alongside_has_ended_when_the_block_has_whatever_ended_that() -> None:
    with Counter() as counted:
        assert counted.num_ended == 0
    assert counted.num_ended == 1
    failing = Counter()
    with pytest.raises(ValueError, match="the block"), failing:
        raise ValueError("the block")
    assert failing.num_ended == 1


def test_a_peak_at_the_very_end_of_the_block_is_seen() -> None:
    sizes = iter([5, 9])
    with PeakSampler(lambda: next(sizes), pause_seconds=60) as peak:
        pass
    assert (peak.before_bytes, peak.peak_bytes, peak.growth_bytes) == (5, 9, 4)
