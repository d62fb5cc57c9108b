"""Packing: a TokenBatch as one row of tokens, with each token's position and each sequence's bounds. No framework."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batching.token_batch import TokenBatch
from worker.model.architectures import BEHIND_PADDING, AttentionShape


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`cu_seqlens[i]` and `cu_seqlens[i + 1]` bound sequence i; its first `prompt_lengths[i]` tokens are not pooled."""

    input_ids: NDArray[np.int64]  # [tokens]
    position_ids: NDArray[np.int64]  # [tokens]
    cu_seqlens: NDArray[np.int64]  # [n + 1]
    prompt_lengths: NDArray[np.int64]  # [n]
    max_seqlen: int


def pack_batch(batch: TokenBatch, shape: AttentionShape) -> PackedBatch:
    """Without a token of padding; positions start again with every sequence."""
    lengths = batch.lengths.astype(np.int64)
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths)))
    input_ids = batch.input_ids.astype(np.int64)
    if shape.positions == BEHIND_PADDING:
        is_counted = input_ids != shape.padding_id
        counted = np.concatenate(([0], np.cumsum(is_counted)))
        before = np.repeat(counted[cu_seqlens[:-1]], lengths)  # counted tokens of the sequences before
        position_ids = (counted[1:] - before) * is_counted + shape.padding_id
    else:
        position_ids = np.arange(len(input_ids)) - np.repeat(cu_seqlens[:-1], lengths)
    return PackedBatch(
        input_ids, position_ids, cu_seqlens, batch.prompt_lengths.astype(np.int64), batch.max_length
    )
