"""Pool the hidden states of a sequence's tokens to one vector, as sentence-transformers defines each mode.

Each mode is implemented twice: for padded sequences, in operations that openvino can convert, and for packed
ones. Source of the definitions: sentence_transformers/sentence_transformer/modules/pooling.py of version 6.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vectormill.models.poolings import CLS, LAST_TOKEN, MAX, MEAN, MEAN_SQRT_LEN, WEIGHTED_MEAN

# Modes that return the hidden state of a single token.
SINGLE_TOKENS: Final = frozenset({CLS, LAST_TOKEN})
SMALLEST_WEIGHT: Final = 1e-9  # avoids division by zero for a sequence without a token to pool


def pool_hidden_states(hidden_states: Tensor, pool_mask: Tensor, modes: Sequence[str]) -> Tensor:
    """Pool states [n, length, dim] by a mask [n, length] to [n, dim * number of modes] in fp32."""
    states = hidden_states.float()  # sums over hundreds of tokens lose digits in 16 bits
    mask = pool_mask.to(torch.float32)
    return torch.cat([POOLINGS[mode](states, mask) for mode in modes], dim=-1)


def _pool_first(states: Tensor, mask: Tensor) -> Tensor:
    """Return the state of the first pooled token: the first of all, or the first after an excluded prompt."""
    is_first = (mask.cumsum(dim=1) == 1) & (mask > 0)
    return (states * is_first.unsqueeze(-1)).sum(dim=1)


def _weigh(mask: Tensor) -> Tensor:
    """Return the mask with the position of each token, from 1, as its weight."""
    return mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype)


def _pool_last(states: Tensor, mask: Tensor) -> Tensor:
    places = _weigh(mask)
    is_last = (places == places.amax(dim=1, keepdim=True)) & (mask > 0)
    return (states * is_last.unsqueeze(-1)).sum(dim=1)


def _pool_mean(states: Tensor, mask: Tensor) -> Tensor:
    return (states * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=SMALLEST_WEIGHT)


def _pool_mean_sqrt_len(states: Tensor, mask: Tensor) -> Tensor:
    total = mask.sum(dim=1, keepdim=True).clamp(min=SMALLEST_WEIGHT)
    return (states * mask.unsqueeze(-1)).sum(dim=1) / total.sqrt()


POOLINGS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    CLS: _pool_first,
    MAX: lambda states, mask: states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(dim=1),
    MEAN: _pool_mean,
    MEAN_SQRT_LEN: _pool_mean_sqrt_len,
    # Tokens after an excluded prompt keep their weights.
    WEIGHTED_MEAN: lambda states, mask: _pool_mean(states, _weigh(mask)),
    LAST_TOKEN: _pool_last,
}


def pool_packed_states(
    hidden_states: Tensor, cu_seqlens: Tensor, prompt_lengths: Tensor | None, modes: Sequence[str]
) -> Tensor:
    """Pool states [tokens, dim] with bounds [n + 1] to [n, dim * number of modes] in fp32.

    The result equals that for padded sequences. `prompt_lengths` [n] are the leading tokens that are not
    pooled; None means none. Each sequence is summed on its own and in order, so that no vector depends on the
    rest of the batch: an index_add on CUDA adds in any order, and a running sum over the batch carries the
    rounding of one sequence into the next.
    """
    # Only the selected tokens are converted to fp32; converting all would take half a gigabyte for a large
    # model's batch.
    states = hidden_states if SINGLE_TOKENS.issuperset(modes) else hidden_states.float()
    packed = _pack(states, cu_seqlens, prompt_lengths)
    return torch.cat([PACKED_POOLINGS[mode](packed) for mode in modes], dim=-1)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Packed states and their bounds. `counts` [n, 1] are the numbers of pooled tokens per sequence."""

    states: Tensor  # [tokens, dim], in fp32 unless every mode takes single tokens
    cu_seqlens: Tensor  # [n + 1]
    first: Tensor  # [n], the index of the first pooled token, if there is any
    counts: Tensor  # [n, 1]
    positions: Tensor  # [tokens, 1], from 1 in each sequence
    mask: Tensor | None  # [tokens, 1], 1 for a pooled token; None if all are pooled

    def sum(self, weights: Tensor | None) -> Tensor:
        """Return for each sequence the sum [n, dim] of its states times `weights` [tokens, 1]."""
        weighted = self.states if weights is None else self.states * weights
        return _reduce(weighted, "sum", self.cu_seqlens)

    def at(self, tokens: Tensor) -> Tensor:
        """Return the state of one token per sequence; zero for a sequence without pooled tokens."""
        return self.states[tokens.clamp(max=len(self.states) - 1)].float() * (self.counts > 0)


def _pack(states: Tensor, cu_seqlens: Tensor, prompt_lengths: Tensor | None) -> _Packed:
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    lengths = ends - starts
    num_tokens = len(states)
    # The output size is given, because torch would otherwise wait for the device to learn it.
    before = torch.repeat_interleave(starts, lengths, output_size=num_tokens)
    positions = torch.arange(1, num_tokens + 1, device=states.device) - before
    if prompt_lengths is None:
        first, mask = starts, None
    else:
        first = starts + prompt_lengths
        prompts = torch.repeat_interleave(prompt_lengths, lengths, output_size=num_tokens)
        mask = (positions > prompts).unsqueeze(-1).float()
    counts = (ends - first).clamp(min=0).unsqueeze(-1).float()
    return _Packed(states, cu_seqlens, first, counts, positions.unsqueeze(-1).float(), mask)


def _reduce(rows: Tensor, how: str, cu_seqlens: Tensor) -> Tensor:
    # unsafe=True skips a check of the bounds that would wait for the device; they come from our own lengths.
    return torch.segment_reduce(rows, how, offsets=cu_seqlens, axis=0, unsafe=True)


def _pool_packed_max(packed: _Packed) -> Tensor:
    rows = (
        packed.states if packed.mask is None else packed.states.masked_fill(packed.mask == 0, float("-inf"))
    )
    return _reduce(rows, "max", packed.cu_seqlens)


def _pool_packed_weighted_mean(packed: _Packed) -> Tensor:
    weights = packed.positions if packed.mask is None else packed.positions * packed.mask
    return packed.sum(weights) / _reduce(weights, "sum", packed.cu_seqlens).clamp(min=SMALLEST_WEIGHT)


PACKED_POOLINGS: Final[dict[str, Callable[[_Packed], Tensor]]] = {
    CLS: lambda packed: packed.at(packed.first),
    MAX: _pool_packed_max,
    MEAN: lambda packed: packed.sum(packed.mask) / packed.counts.clamp(min=SMALLEST_WEIGHT),
    MEAN_SQRT_LEN: lambda packed: packed.sum(packed.mask) / packed.counts.clamp(min=SMALLEST_WEIGHT).sqrt(),
    WEIGHTED_MEAN: _pool_packed_weighted_mean,
    LAST_TOKEN: lambda packed: packed.at(packed.cu_seqlens[1:].long() - 1),
}
