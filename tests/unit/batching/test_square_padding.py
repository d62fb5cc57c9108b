"""Where attention takes matrices of the length squared, it is squares of which a batch pads little."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import read_card
from tests.rexuninlu import GOLDEN
from worker.batching.cost import PaddedCost
from worker.batching.limits import BatchLimits
from worker.batching.pool import SequencePool
from worker.encoder.encoder import Choice, EncoderReport
from worker.engine.batch_bounds import bound_batches, find_batch_cost, foresee_footprint

LIMITS = BatchLimits(1024)
COST = PaddedCost(1536, holds_squares=True)
PROMISED = LIMITS.square_factor * LIMITS.mean_padding_share


def take_all(requests: list[list[int]], budget: int) -> list[list[int]]:
    """The lengths of every batch."""
    pool = SequencePool(LIMITS, COST)
    pool.budget = lambda length: budget
    for number, lengths in enumerate(requests):
        pool.add(number, lengths)
    batches = []
    while len(pool):
        batches.append(pool.take_batch().lengths.tolist())
    return batches


def count_squares(batches: list[list[int]]) -> tuple[int, int]:
    """Of the sequences, and of what is computed of them."""
    own = sum(length**2 for batch in batches for length in batch)
    return own, sum(len(batch) * max(batch) ** 2 for batch in batches)


@given(
    requests=st.lists(st.lists(st.integers(4, 512), min_size=1, max_size=60), min_size=1, max_size=6),
    budget=st.sampled_from([512, 2048, 32_768]),
)
def test_no_lengths_pad_more_of_the_squares_than_is_promised(requests: list[list[int]], budget: int) -> None:
    batches = take_all(requests, budget)
    assert sorted(length for batch in batches for length in batch) == sorted(
        length for request in requests for length in request
    )
    own, computed = count_squares(batches)
    assert computed - own <= PROMISED * computed + LIMITS.max_saved_tokens  # what a pool begins with


@pytest.mark.parametrize("budget", [1024, 4096, 32_768])
def test_texts_of_all_lengths_below_hints_of_all_lengths_share_batches(budget: int) -> None:
    """A third of the batches that padding nothing would take, and less than a twentieth of padding."""
    random = np.random.default_rng(7)
    texts = random.lognormal(3.6, 0.9, 900)
    hints = random.choice([7, 15, 20, 35, 110], 900)
    lengths = np.minimum(512, texts.astype(int) + hints + 3)
    batches = take_all([part.tolist() for part in np.array_split(lengths, 10)], budget)
    own, computed = count_squares(batches)
    assert 1 - own / computed < 0.05
    assert len(batches) < len(np.unique(lengths))


def make_report() -> EncoderReport:
    choice = Choice("", "")
    return EncoderReport(choice, choice, Choice("fp32", ""), "padded (disentangled, by sequence)", 1, 0.0)


def test_an_extraction_is_costed_by_its_squares_and_bounded_by_what_they_take() -> None:
    card, report = read_card(GOLDEN / "model"), make_report()
    cost = find_batch_cost(card, report)
    assert isinstance(cost, PaddedCost)
    assert cost.holds_squares
    footprint = foresee_footprint(card, report)
    assert footprint is not None
    free_bytes = 1 << 30
    most = bound_batches(footprint, free_bytes, 1)
    pool = SequencePool(LIMITS, cost)
    pool.budget = most
    for length in (64, 512):
        pool.add(length, [length] * 100_000)
        batch = pool.take_batch()
        pool.remove(length)
        assert footprint.predict_batch_bytes(len(batch), length) <= free_bytes
        # Of each two tokens the number of their distance, the mask and the logit, for all sequences together.
        assert len(batch) * length**2 * (8 + 1 + 4) <= free_bytes
