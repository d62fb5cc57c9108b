"""Pooling: the hidden states of a sequence's tokens to one vector, as sentence-transformers defines each mode.

Written for sequences padded on the right, and in operations that openvino can convert. Source of the definitions:
sentence_transformers/sentence_transformer/modules/pooling.py of version 6.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from vectormill.model_card import CLS, LAST_TOKEN, MAX, MEAN, MEAN_SQRT_LEN, WEIGHTED_MEAN

SMALLEST_WEIGHT: Final = 1e-9  # what a sequence without any token to pool over is divided by


def pool_hidden_states(hidden_states: Tensor, pool_mask: Tensor, modes: Sequence[str]) -> Tensor:
    """[n, length, dim] and a mask [n, length] of the tokens that count -> [n, dim * number of modes], in fp32."""
    states = hidden_states.float()  # sums over hundreds of tokens lose digits in 16 bit
    mask = pool_mask.to(torch.float32)
    return torch.cat([POOLINGS[mode](states, mask) for mode in modes], dim=-1)


def _pool_first(states: Tensor, mask: Tensor) -> Tensor:
    """The first token that counts: the first of all, or the first behind a prompt that is left out."""
    is_first = (mask.cumsum(dim=1) == 1) & (mask > 0)
    return (states * is_first.unsqueeze(-1)).sum(dim=1)


def _pool_last(states: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype)
    places = mask * positions
    is_last = (places == places.amax(dim=1, keepdim=True)) & (mask > 0)
    return (states * is_last.unsqueeze(-1)).sum(dim=1)


def _pool_max(states: Tensor, mask: Tensor) -> Tensor:
    return states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(dim=1)


def _pool_mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=SMALLEST_WEIGHT)


def _pool_mean_sqrt_len(states: Tensor, mask: Tensor) -> Tensor:
    total = mask.sum(dim=1, keepdim=True).clamp(min=SMALLEST_WEIGHT)
    return (states * mask.unsqueeze(-1)).sum(dim=1) / total.sqrt()


def _pool_weighted_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Weights 1, 2, 3, …; tokens behind a prompt that is left out keep theirs."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype)
    return (states * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True).clamp(
        min=SMALLEST_WEIGHT
    )


POOLINGS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    CLS: _pool_first,
    MAX: _pool_max,
    MEAN: _pool_mean,
    MEAN_SQRT_LEN: _pool_mean_sqrt_len,
    WEIGHTED_MEAN: _pool_weighted_mean,
    LAST_TOKEN: _pool_last,
}
