"""A batch is divided between ranks so that no other division has a smaller largest part."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.batch import Batch
from worker.parallel.shard import divide_batch


def make_batch(lengths: list[int]) -> Batch:
    return Batch.from_ids([np.full(length, place, np.int32) for place, length in enumerate(lengths)])


def find_size(lengths: list[int], *, pads: bool) -> int:
    return len(lengths) * max(lengths) if pads else sum(lengths)


def find_smallest(lengths: list[int], most: int, *, pads: bool) -> int:
    """Try every division between sequences."""
    places = range(1, len(lengths))
    return min(
        max(find_size(lengths[start:end], pads=pads) for start, end in pairwise((0, *cuts, len(lengths))))
        for count in range(min(most, len(lengths)))
        for cuts in combinations(places, count)
    )


@pytest.mark.parametrize("pads", [True, False])
@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=9), most=st.integers(1, 5))
def test_the_largest_part_of_a_divided_batch_is_as_small_as_possible(
    lengths: list[int], most: int, pads: bool
) -> None:
    parts = divide_batch(make_batch(lengths), most, pads=pads)
    assert 1 <= len(parts) <= most
    assert (
        np.concatenate([part.input_ids for part in parts]).tolist() == make_batch(lengths).input_ids.tolist()
    )
    assert [length for part in parts for length in part.lengths.tolist()] == lengths, (
        "in order, and none is lost"
    )
    largest = max(find_size(part.lengths.tolist(), pads=pads) for part in parts)
    assert largest == find_smallest(lengths, most, pads=pads)


def test_two_long_texts_are_not_computed_by_one_rank() -> None:
    """They were where the first one reached the target exactly, or texts before it stayed just below."""
    parts = divide_batch(make_batch([10, 500, 500, 10]), 2, pads=False)
    assert [part.lengths.tolist() for part in parts] == [[10, 500], [500, 10]]
