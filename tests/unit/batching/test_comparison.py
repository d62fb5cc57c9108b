"""Which of two sizes is faster, when batches come as they come: not in turns, and on a machine that changes."""

import pytest

from worker.batching.comparison import MOST_PAIRS, Comparison


def compare(challenger_rate: float) -> float:
    """Three batches of the incumbent to one of the challenger, on a machine that grows slower and slower."""
    compared = Comparison(1024, 512)
    for moment in range(4 * MOST_PAIRS):
        size = 512 if moment % 4 == 3 else 1024
        rate = (challenger_rate if size == 512 else 1.0) / (1 + moment / 100)
        compared.observe(size, rate, 1 / rate)
        if compared.is_decided:
            return compared.ratio
    raise AssertionError("never decided")


@pytest.mark.parametrize("challenger_rate", [0.9, 1.0, 1.1])
def test_a_batch_is_set_against_its_neighbour(challenger_rate: float) -> None:
    assert compare(challenger_rate) == pytest.approx(challenger_rate, rel=0.02)


def test_the_other_size_is_asked_for_as_soon_as_one_waits_for_its_pair() -> None:
    compared = Comparison(1024, 512)
    asked = []
    for _ in range(6):
        asked.append(compared.next_size)
        compared.observe(asked[-1], 1.0, 1.0)
    assert asked == [1024, 512] * 3
