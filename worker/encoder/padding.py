"""Pad a batch to the rectangular arrays that most kernels need. Imports no framework."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.batching.cost import LengthBuckets
from worker.tokens.tokenized import INPUT_IDS


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A padded batch. All arrays are int64 [n, length], as long as the longest sequence or its bucket.

    `tokens` are, by name, the inputs that have one value per token. `pool_mask` excludes padding and prompts
    that are not pooled; without such prompts it is `attention_mask` itself.
    """

    tokens: Mapping[str, NDArray[np.int64]]
    attention_mask: NDArray[np.int64]
    pool_mask: NDArray[np.int64]

    @property
    def input_ids(self) -> NDArray[np.int64]:
        return self.tokens[INPUT_IDS]


def pad_batch(
    batch: Batch, pad_token_id: int, buckets: LengthBuckets | None = None, unattended: int | None = None
) -> PaddedBatch:
    """Pad sequences on the right, to the longest of the batch or to its bucket.

    No token attends to the tokens `unattended` at the end of a sequence.
    """
    longest = batch.max_length
    positions = np.arange(longest if buckets is None else buckets.find(longest))
    is_token = positions < batch.lengths[:, None]
    tokens = {}
    for name, padding in TOKEN_INPUTS.items():
        if name in batch.inputs:
            values = np.full(is_token.shape, pad_token_id if padding is None else padding, dtype=np.int64)
            values[is_token] = batch.inputs[name].covered
            tokens[name] = values
    attention_mask = pool_mask = is_token.astype(np.int64)
    if unattended is not None:
        is_other = is_token & (tokens[INPUT_IDS] != unattended)
        attended = longest - np.argmax(is_other[:, :longest][:, ::-1], axis=1)
        attention_mask = (positions < attended[:, None]).astype(np.int64)
    if (prompt_lengths := batch.prompt_lengths) is not None:
        pool_mask = attention_mask * (positions >= prompt_lengths[:, None])
    return PaddedBatch(tokens, attention_mask, pool_mask)
