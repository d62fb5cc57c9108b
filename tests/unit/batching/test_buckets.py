"""The lengths to which sequences are padded where shapes cost memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.batching.batch import Batch
from worker.batching.cost import LengthBuckets
from worker.encoder.padding import pad_batch

LONGEST = 8192


@pytest.mark.parametrize(
    ("num_tokens", "length"),
    [(1, 1), (31, 31), (32, 32), (33, 34), (63, 64), (64, 64), (65, 68), (129, 136), (255, 256), (257, 272)],
)
def test_a_sequence_is_padded_to_the_shortest_bucket_that_holds_it(num_tokens: int, length: int) -> None:
    assert LengthBuckets(LONGEST).find(num_tokens) == length


@given(num_tokens=st.integers(1, LONGEST), longest=st.integers(1, LONGEST))
def test_no_bucket_is_longer_than_the_model_reads_nor_shorter_than_what_it_holds(
    num_tokens: int, longest: int
) -> None:
    length = LengthBuckets(longest).find(num_tokens)
    assert num_tokens <= length <= max(num_tokens, longest)
    assert length < num_tokens * (1 + 1 / 16)
    assert LengthBuckets(longest).find(length) == length, "what is in its bucket stays"


def test_lengths_are_few_however_long_texts_are_and_padded_little() -> None:
    buckets = LengthBuckets(LONGEST)
    found = [buckets.find(num_tokens) for num_tokens in range(1, LONGEST + 1)]
    assert len(set(found)) <= 16 * 10  # ten doublings from 8 to 8,192 and, before, every length
    assert sum(found) / sum(range(1, LONGEST + 1)) <= 1.025


def test_a_batch_is_padded_to_the_bucket_of_its_longest_and_nothing_counts_that_is_padding() -> None:
    batch = Batch.from_ids([np.arange(1, 34, dtype=np.int32), np.arange(1, 21, dtype=np.int32)])
    padded = pad_batch(batch, 0, LengthBuckets(LONGEST))
    assert padded.input_ids.shape == padded.attention_mask.shape == padded.pool_mask.shape == (2, 34)
    assert padded.attention_mask.sum(axis=1).tolist() == padded.pool_mask.sum(axis=1).tolist() == [33, 20]
