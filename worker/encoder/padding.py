"""Padding: a packed TokenBatch to the rectangular arrays that most kernels want. Knows no framework."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batching.cost import LengthBuckets
from worker.batching.token_batch import TokenBatch


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """All arrays are [n, length] int64, as long as the longest or its bucket.

    `pool_mask` leaves out padding and prompts that are not pooled over.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    pool_mask: NDArray[np.int64]


def pad_batch(batch: TokenBatch, pad_token_id: int, buckets: LengthBuckets | None = None) -> PaddedBatch:
    """Padded on the right, to the batch's own longest sequence or its bucket."""
    positions = np.arange(batch.max_length if buckets is None else buckets.find(batch.max_length))
    is_token = positions < batch.lengths[:, None]
    input_ids = np.full(is_token.shape, pad_token_id, dtype=np.int64)
    input_ids[is_token] = batch.input_ids
    attention_mask = is_token.astype(np.int64)
    pool_mask = attention_mask
    if batch.prompt_lengths.any():
        pool_mask = attention_mask * (positions >= batch.prompt_lengths[:, None])
    return PaddedBatch(input_ids, attention_mask, pool_mask)
