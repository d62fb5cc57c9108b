"""Packed attention: kernels for sequences one after another, each registered with transformers under a name.

VARLEN is torch's varlen_attn on CUDA, and DIRECT what that wraps; EXACT runs torch's scaled_dot_product_attention
sequence by sequence, anywhere and in any precision, and OPAQUE hides that from a compiler. All read what transformers
hands to every attention function: `cu_seq_lens_q` and `max_length_q`, given to the model's forward and passed down by
it, and the layer's own scaling, direction and window.

No mask function is registered with AttentionMaskInterface, on purpose: for a name without one, transformers builds no
mask at all, and a mask over all tokens of a batch would be quadratic in them.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from worker.model.runtime import transformers

VARLEN: Final = "vectormill_varlen"
DIRECT: Final = "vectormill_direct"
EXACT: Final = "vectormill_exact"
OPAQUE: Final = "vectormill_opaque"

NO_WINDOW: Final = (-1, -1)
CAUSAL_WINDOW: Final = (-1, 0)

flash_operator = torch.ops.aten._flash_attention_forward.default

# (query, key, value, cu_seqlens, max_seqlen, scale, window) -> [tokens, heads, head_dim]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, tuple[int, int]], Tensor]


def find_window(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> tuple[int, int]:
    """Return how many tokens to the left and to the right a token sees besides itself; -1 is all of them.

    A causal layer counts the token itself in its `sliding_window`. A bidirectional one looks `config.sliding_window`
    tokens either way, as transformers' own masks have it.
    """
    if is_causal is None:
        is_causal = bool(module.is_causal)
    if is_causal:
        return (-1 if sliding_window is None else sliding_window - 1, 0)
    if sliding_window is None:
        return NO_WINDOW
    reach: int = module.config.sliding_window
    return (reach, reach)


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Attend with torch's kernel. query [tokens, heads, head_dim], key, value [tokens, key heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn  # brings torch's compiler, and only CUDA comes here

    output: Tensor = varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=window,
        enable_gqa=key.shape[1] != query.shape[1],
        num_splits=_choose_num_splits(),
    )
    return output


def direct_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Attend as varlen_kernel does, without the overhead of a custom operator and its zeros on the device for a state
    of random numbers. Source: torch/nn/attention/varlen.py, `_varlen_attn`.

    Where no flash kernel is, on a processor, it is the exact one.
    """
    if not query.is_cuda:
        return exact_kernel(query, key, value, cu_seqlens, max_seqlen, scale, window)
    output: Tensor = flash_operator(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,  # no dropout
        window == CAUSAL_WINDOW,
        False,  # no debug mask
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
        num_splits=_choose_num_splits(),
    )[0]
    return output


def _choose_num_splits() -> int | None:
    """Return 1 where a kernel could split a sequence, so that its result does not depend on its company. FlashAttention
    2, which torch carries, does not split without a paged cache, and refuses the argument.
    """
    return None if current_flash_attention_impl() is None else 1


def exact_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Attend sequence by sequence, on any device and in any precision. Other kernels are compared with this one."""
    mask = make_window_mask(max_seqlen, window, query.device)
    outputs = [
        scaled_dot_product_attention(
            query[start:end].transpose(0, 1).unsqueeze(0),  # [1, heads, length, head_dim]
            key[start:end].transpose(0, 1).unsqueeze(0),
            value[start:end].transpose(0, 1).unsqueeze(0),
            attn_mask=None if mask is None else mask[: end - start, : end - start],
            scale=scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        for start, end in pairwise(cu_seqlens.tolist())
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


@torch.library.custom_op("vectormill::exact_attention", mutates_args=())
def exact_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    left: int,
    right: int,
) -> Tensor:
    """Attend as exact_kernel does, as one call in a compiled graph, which cannot follow a loop over bounds."""
    return exact_kernel(query, key, value, cu_seqlens, max_seqlen, scale, (left, right)).contiguous()


@exact_operator.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


def opaque_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    output: Tensor = exact_operator(query, key, value, cu_seqlens, max_seqlen, scale, *window)
    return output


KERNELS: Final[dict[str, Kernel]] = {
    VARLEN: varlen_kernel,
    DIRECT: direct_kernel,
    EXACT: exact_kernel,
    OPAQUE: opaque_kernel,
}


def make_window_mask(max_seqlen: int, window: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return [length, length], True where a token sees another; None if it sees all."""
    if window == NO_WINDOW:
        return None
    positions = torch.arange(max_seqlen, device=device)
    distance = positions - positions.unsqueeze(1)  # [query, key]: negative to the left
    left, right = (max_seqlen if reach < 0 else reach for reach in window)
    return (distance >= -left) & (distance <= right)


def make_attention(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """Return the kernel as the function that transformers calls in every layer."""

    def attend(
        module: nn.Module,
        query: Tensor,  # [1, heads, tokens, head_dim]
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,  # required: an architecture that drops it must fail, not mix sequences
        max_length_q: int,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        window = find_window(module, is_causal, sliding_window)
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        return kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, window).unsqueeze(0), None

    return attend


def register_packed_attention() -> None:
    """Register the kernels with transformers. May be called again."""
    for name, kernel in KERNELS.items():
        transformers.AttentionInterface.register(name, make_attention(kernel))
