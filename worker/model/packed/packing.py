"""Packing: a Batch as one row of tokens, with each token's position and each sequence's bounds. No framework."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.model.architectures import BEHIND_PADDING, AttentionShape
from worker.tokens.tokenized import INPUT_IDS


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`cu_seqlens[i]` and `cu_seqlens[i + 1]` bound sequence i; its first `prompt_lengths[i]` tokens are not pooled.

    `tokens` are the inputs with a value a token, by name.
    """

    tokens: Mapping[str, NDArray[np.int64]]  # each [tokens]
    position_ids: NDArray[np.int64]  # [tokens]
    cu_seqlens: NDArray[np.int64]  # [n + 1]
    prompt_lengths: NDArray[np.int64] | None  # [n]; None when all tokens are pooled
    max_seqlen: int

    @property
    def input_ids(self) -> NDArray[np.int64]:
        return self.tokens[INPUT_IDS]


def pack_batch(batch: Batch, shape: AttentionShape) -> PackedBatch:
    """Pack the batch without padding. Positions start again with every sequence."""
    tokens = {
        name: batch.inputs[name].covered.astype(np.int64) for name in TOKEN_INPUTS if name in batch.inputs
    }
    offsets = batch.inputs[INPUT_IDS].offsets
    cu_seqlens = offsets - offsets[0]
    lengths = np.diff(cu_seqlens)
    input_ids = tokens[INPUT_IDS]
    if shape.positions == BEHIND_PADDING:
        is_counted = input_ids != shape.padding_id
        counted = np.concatenate(([0], np.cumsum(is_counted)))
        before = np.repeat(counted[cu_seqlens[:-1]], lengths)  # counted tokens of the sequences before
        position_ids = (counted[1:] - before) * is_counted + shape.padding_id
    else:
        position_ids = np.arange(len(input_ids)) - np.repeat(cu_seqlens[:-1], lengths)
    return PackedBatch(tokens, position_ids, cu_seqlens, batch.prompt_lengths, batch.max_length)
