"""Run a network over packed sequences: one after another in a single row of tokens, without padding.

PackedBatch is a batch in that layout. FLASH is torch's flash operator on CUDA; EXACT runs torch's
scaled_dot_product_attention sequence by sequence on any device and in any precision, and OPAQUE hides that
loop from a compiler. All of them read what transformers passes to every attention function: `cu_seq_lens_q`
and `max_length_q`, given to the model's forward and passed down by it, and the layer's own scaling, direction
and window.

No mask function is registered with AttentionMaskInterface, on purpose: for a name without one, transformers
builds no mask at all, and a mask over all tokens of a batch would have their number squared.

Packing is compared with padding before it is used, because a kernel with a wrong mask or wrong positions does
not fail: it returns wrong vectors.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from vectormill.domain.errors import ModelError
from vectormill.models.families import BEHIND_PADDING, find_family
from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.encoder.choice import AttentionShape, looks_back_alone, read_attention_shape
from worker.encoder.padding import pad_batch
from worker.model.cuda_pass import is_device_lost
from worker.model.network import EncoderNetwork
from worker.model.prefixes import ROWS_OF_TOKENS, TOKENS_OF_ROWS, find_shared_prefixes
from worker.model.runtime import transformers
from worker.model.weights import Rounded
from worker.tokens.tokenized import INPUT_IDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch as one row of tokens, with each token's position and each sequence's bounds.

    `cu_seqlens[i]` and `cu_seqlens[i + 1]` bound sequence i; its first `prompt_lengths[i]` tokens are not
    pooled. `tokens` are, by name, the inputs that have one value per token. If sequences share `prefixes`, as
    find_shared_prefixes returns them, these and the positions have one value per row.
    """

    tokens: Mapping[str, NDArray[np.int64]]  # each [tokens], or [rows] with shared prefixes
    position_ids: NDArray[np.int64]  # [tokens], or [rows]
    cu_seqlens: NDArray[np.int64]  # [n + 1]
    prompt_lengths: NDArray[np.int64] | None  # [n]; None when all tokens are pooled
    max_seqlen: int
    prefixes: Mapping[str, NDArray[np.int64]]

    @property
    def input_ids(self) -> NDArray[np.int64]:
        return self.tokens[INPUT_IDS]


def pack_batch(batch: Batch, shape: AttentionShape, *, shares_prefixes: bool = False) -> PackedBatch:
    """Pack the batch without padding. Position ids restart in every sequence.

    `shares_prefixes` is for causal models alone.
    """
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
    prefixes: Mapping[str, NDArray[np.int64]] = {}
    if shares_prefixes:
        prefixes = find_shared_prefixes(np.stack(list(tokens.values()), axis=1), cu_seqlens)
    if prefixes:
        tokens = {name: values[prefixes[TOKENS_OF_ROWS]] for name, values in tokens.items()}
        position_ids = position_ids[prefixes[TOKENS_OF_ROWS]]
    return PackedBatch(tokens, position_ids, cu_seqlens, batch.prompt_lengths, batch.max_length, prefixes)


FLASH: Final = "vectormill_direct"  # transformers takes any name with "flash" for a package of its own
EXACT: Final = "vectormill_exact"
OPAQUE: Final = "vectormill_opaque"

NO_WINDOW: Final = (-1, -1)
CAUSAL_WINDOW: Final = (-1, 0)

flash_operator = torch.ops.aten._flash_attention_forward.default
# torch 2.13 and newer can forbid a kernel to split a sequence.
CAN_LIMIT_SPLITS: Final = any(argument.name == "num_splits" for argument in flash_operator._schema.arguments)

# What a kernel attends over: the bounds `cu_seqlens`, `max_seqlen`, the scale of scores, and the window.
Over = tuple[Tensor, int, float | None, tuple[int, int]]
# From query [tokens, heads, head_dim], and key and value [tokens, key heads, head_dim], to [tokens, heads, head_dim].
Kernel = Callable[[Tensor, Tensor, Tensor, *Over], Tensor]


def find_window(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> tuple[int, int]:
    """Return how many tokens to the left and to the right of itself a token attends to; -1 means all.

    `sliding_window` of a causal layer includes the token itself. A bidirectional layer attends to
    `config.sliding_window` tokens on either side, in some families with itself among them, as in
    transformers' own masks.
    """
    if is_causal is None:
        is_causal = bool(module.is_causal)
    if is_causal:
        return (-1 if sliding_window is None else sliding_window - 1, 0)
    if sliding_window is None:
        return NO_WINDOW
    reach = int(module.config.sliding_window) - find_family(module.config.model_type).counts_itself
    return (reach, reach)


def flash_kernel(query: Tensor, key: Tensor, value: Tensor, *over: *Over) -> Tensor:
    """Attend with torch's flash operator, without the custom operator that torch wraps around it.

    The wrapper takes 9 µs more and fills a random state with zeros on the device. Source:
    torch/nn/attention/varlen.py, `_varlen_attn`.
    """
    cu_seqlens, max_seqlen, scale, window = over
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
        **({"num_splits": _choose_num_splits()} if CAN_LIMIT_SPLITS else {}),
    )[0]
    return output


def _choose_num_splits() -> int | None:
    """Return 1 if a kernel could split a sequence, so that no result depends on the rest of the batch.

    Return None for FlashAttention 2, which torch ships: it does not split without a paged cache, and refuses
    the argument.
    """
    return None if current_flash_attention_impl() is None else 1


def exact_kernel(query: Tensor, key: Tensor, value: Tensor, *over: *Over) -> Tensor:
    """Attend sequence by sequence, on any device and in any precision. The reference for other kernels."""
    cu_seqlens, max_seqlen, scale, window = over
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
    """Attend as exact_kernel does, as a single operator of a compiled graph.

    A compiler cannot follow a loop whose bounds are values in a tensor.
    """
    return exact_kernel(query, key, value, cu_seqlens, max_seqlen, scale, (left, right)).contiguous()


@exact_operator.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


def opaque_kernel(query: Tensor, key: Tensor, value: Tensor, *over: *Over) -> Tensor:
    *bounds, window = over
    output: Tensor = exact_operator(query, key, value, *bounds, *window)
    return output


KERNELS: Final[dict[str, Kernel]] = {
    FLASH: flash_kernel,
    EXACT: exact_kernel,
    OPAQUE: opaque_kernel,
}


def make_window_mask(max_seqlen: int, window: tuple[int, int], device: torch.device) -> Tensor | None:
    """Return bool [length, length], True where a token attends to another; None if it attends to all."""
    if window == NO_WINDOW:
        return None
    positions = torch.arange(max_seqlen, device=device)
    distance = positions - positions.unsqueeze(1)  # [query, key]: negative to the left
    left, right = (max_seqlen if reach < 0 else reach for reach in window)
    return (distance >= -left) & (distance <= right)


def make_attention(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """Return the kernel as an attention function that transformers calls in every layer."""

    def attend(
        module: nn.Module,
        query: Tensor,  # [1, heads, tokens, head_dim]
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,  # required: an architecture that drops it must fail, not mix sequences
        max_length_q: int,
        token_rows: Tensor | None = None,  # [tokens], where prefixes are shared and `tokens` above are rows
        row_tokens: Tensor | None = None,  # [rows]
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        window = find_window(module, is_causal, sliding_window)
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        if token_rows is not None:
            query, key, value = (part.index_select(0, token_rows) for part in (query, key, value))
        output = kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)
        if row_tokens is not None:
            output = output.index_select(0, row_tokens)
        return output.unsqueeze(0), None

    return attend


def register_packed_attention() -> None:
    """Register the kernels with transformers. May be called more than once."""
    for name, kernel in KERNELS.items():
        transformers.AttentionInterface.register(name, make_attention(kernel))


# Lengths of a probe's sequences: a single token, sequences after another one's end, and a long sequence.
PROBE_LENGTHS: Final = (1, 5, 37, 150)
# Another probe exceeds the window of local layers by this many tokens, if the model reads that many: its last
# tokens may not attend to its first ones.
BEYOND_WINDOW: Final = 22
# The lowest accepted cosine between a token's hidden states with packing and with padding. Two kernels in 16
# bit differ by their rounding.
SMALLEST_COSINES: Final = {torch.float32: 0.9999}
SMALLEST_COSINE_16_BIT: Final = 0.999
SIXTEEN_BITS: Final = (torch.bfloat16, torch.float16)
# Below this cosine a network of 16 bits is compared with fp32 as well, because a switch may take the rest.
CLOSE_COSINE: Final = 0.9995
MOST_TIMES: Final = 2.0


class PackingFailed(Exception):
    """Packed attention does not give the results of padding.

    The message completes a sentence after "because".
    """


class PackedNetwork(nn.Module):
    """The whole network over packed tokens [tokens] with bounds [n + 1].

    It returns vectors [n, card.dimension] in fp32. It changes the given network, whose transformer attends
    with the packed kernel from now on. With `shares_prefixes`, for causal models alone, a prefix that sequences share
    is computed once.
    """

    def __init__(self, network: EncoderNetwork, kernel: str, *, shares_prefixes: bool = False) -> None:
        super().__init__()
        self.shares_prefixes = shares_prefixes
        register_packed_attention()
        self.transformer = network.transformer
        self.transformer.set_attn_implementation(kernel)
        # Present where 16 bits round so much that it is needed.
        self.reference: ExactReference | None = None
        self.eval()

    @property
    def attention(self) -> str:
        return str(self.transformer.config._attn_implementation)

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        **prefixes: Tensor,
    ) -> Tensor:
        """Return hidden states [tokens, dim], without any padding. `prefixes` are those of a PackedBatch."""
        states: Tensor = self.transformer(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            cu_seq_lens_q=cu_seqlens,
            max_length_q=max_seqlen,
            **prefixes,
        )[0]
        return states[0][prefixes[ROWS_OF_TOKENS]] if prefixes else states[0]


def find_layers(transformer: nn.Module) -> list[nn.Module]:
    """Return the module list that holds most of the model's weights; of nested lists the outer one.

    Raises ValueError if the model has no such list.
    """
    lists = [module for module in transformer.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError("the model has no list of layers")
    largest = max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()))
    return list(largest)


def pack_network(
    network: EncoderNetwork,
    kernel: str,
    shape: AttentionShape,
    max_tokens: int,
    device: torch.device,
    *,
    shares_prefixes: bool = False,
) -> PackedNetwork:
    """Return the packed network, compared with padding.

    Raises PackingFailed if packing fails and the padded network still works, and ModelError if the device is
    lost.
    """
    probes = make_probes(network.transformer.config, max_tokens)
    padded_attention = network.attention
    try:
        with torch.inference_mode():
            expected = padded_states(network, probes, device)
            packed = PackedNetwork(network, kernel, shares_prefixes=shares_prefixes)
            found = compute_probes(packed, shape, max_tokens, device)
        if find_deviation(expected, found, CLOSE_COSINE) and expected[0].dtype in SIXTEEN_BITS:
            network.transformer.set_attn_implementation(padded_attention)
            packed.reference = make_reference(network, probes, expected, device)
            network.transformer.set_attn_implementation(kernel)
        if deviation := find_deviation(expected, found, reference=packed.reference):
            raise PackingFailed(f"packed attention deviates from padding: {deviation}")
    except Exception as error:
        if device.type == "cuda" and is_device_lost():
            raise ModelError(
                f"Packed attention broke {device} for this process ({first_line(error)}); use padded attention."
            ) from error
        network.transformer.set_attn_implementation(padded_attention)
        if isinstance(error, PackingFailed):
            raise
        # A kernel that is missing or refuses a shape may raise any exception; the padded network still works.
        raise PackingFailed(f"packed attention failed: {first_line(error)}") from error
    return packed


def padded_states(network: EncoderNetwork, probes: Sequence[Batch], device: torch.device) -> list[Tensor]:
    """Return the padded network's hidden states [tokens, dim] of each probe."""
    states = []
    for probe in probes:
        padded = pad_batch(probe, network.pad_token_id)
        attention_mask = torch.from_numpy(padded.attention_mask).to(device)
        input_ids = torch.from_numpy(padded.input_ids).to(device)
        found: Tensor = network.transformer(input_ids=input_ids, attention_mask=attention_mask)[0]
        states.append(found[attention_mask.bool()])
    return states


@dataclass(frozen=True, slots=True)
class ExactReference:
    """The states of the probes in fp32, and by how much the cosines of the padded network's fall short of 1."""

    states: Sequence[Tensor]
    padded: Tensor

    def accepts(self, found: Sequence[Tensor]) -> bool:
        """Return whether states are no more than MOST_TIMES as far away, for the worst token and on average."""
        errors = 1 - _cosines(self.states, found)
        return all(bool(fold(errors) <= MOST_TIMES * fold(self.padded)) for fold in (torch.max, torch.mean))


def make_reference(
    network: EncoderNetwork, probes: Sequence[Batch], expected: Sequence[Tensor], device: torch.device
) -> ExactReference | None:
    """Return the reference, given the padded network's states; None if it fails, for example for lack of memory.

    The weights of each module are fp32 while it runs, so that no more than one of them is held twice.
    """
    held: dict[nn.Module, list[tuple[Any, str, Any]]] = {}

    def widen(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.Embedding):  # its rows are exact
            return
        wide = [
            (each, "data", each.data)
            for each in module.parameters(recurse=False)
            if each.dtype in SIXTEEN_BITS
        ]
        held[module] = [*wide, *([(module, "dtype", module.dtype)] if isinstance(module, Rounded) else [])]
        for parameter, _name, data in wide:
            parameter.data = data.float()
        if isinstance(module, Rounded):
            module.dtype = torch.float32

    def restore(module: nn.Module, _: Any, output: Any) -> Any:
        for place in held.pop(module, ()):
            setattr(*place)
        return output.float() if isinstance(module, nn.Embedding) else output

    hooks = [register_module_forward_pre_hook(widen), register_module_forward_hook(restore, always_call=True)]
    try:
        with torch.no_grad():  # parameters cannot hold what inference mode makes
            states = padded_states(network, probes, device)
        return ExactReference(states, 1 - _cosines(states, expected))
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything; then only the cosine decides
        logger.warning("Cannot compute the network in fp32 for comparison: %s", first_line(error))
        return None
    finally:
        for hook in hooks:
            hook.remove()


def first_line(error: Exception) -> str:
    """Return the first line of an error, and the second line if the first only introduces it."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def find_deviation(
    expected: Sequence[Tensor],
    found: Sequence[Tensor],
    smallest_cosine: float | None = None,
    reference: ExactReference | None = None,
) -> str:
    """Return by how much the states [tokens, dim] of the probes deviate; empty if they agree.

    `smallest_cosine` is the lowest accepted cosine of a token's states; None stands for the one that two
    kernels of this precision reach. Many layers of 16 bits may round to any cosine, so it is also enough that the
    `reference` accepts what was found.
    """
    bound = smallest_cosine or SMALLEST_COSINES.get(expected[0].dtype, SMALLEST_COSINE_16_BIT)
    smallest = float(_cosines(expected, found).min())
    # The comparisons are written so that NaN fails too.
    if smallest >= bound or (reference is not None and reference.accepts(found)):
        return ""
    return f"the smallest cosine is {smallest:.4f}"


def _cosines(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return the cosine of each token's states, of all probes."""
    pairs = zip(one, other, strict=True)
    return torch.cat([cosine_similarity(own.float(), its.float(), dim=-1) for own, its in pairs])


def make_random_batch(config: Any, lengths: Iterable[int], tokens: np.random.Generator) -> Batch:
    ids = [tokens.integers(0, config.vocab_size, length).astype(np.int32) for length in lengths]
    return Batch.from_ids(ids)


def make_probes(config: Any, max_tokens: int) -> list[Batch]:
    """Return test batches, which are the same on every machine.

    The longest sequence gets a separate batch. If the model is causal, so do sequences that share a prefix.
    """
    tokens = np.random.default_rng(0)

    def make(lengths: Iterable[int]) -> Batch:
        return make_random_batch(config, lengths, tokens)

    # The layers' largest attention window in tokens; 0 if every layer attends to all tokens.
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    windows = (getattr(config, name, None) for name in ("sliding_window", "local_attention"))
    window = max(map(int, filter(None, windows)), default=0) if "sliding_attention" in kinds else 0
    longest = min(max(PROBE_LENGTHS), max_tokens)
    beyond = min(window + BEYOND_WINDOW, max_tokens)
    probes = [make(min(length, max_tokens) for length in PROBE_LENGTHS)]
    if looks_back_alone(config):
        rows = [probes[0].inputs[INPUT_IDS].row(number) for number in range(len(probes[0]))]
        prefix = rows[-1][: len(rows[-1]) // 2]
        probes.append(Batch.from_ids([np.concatenate((prefix, row))[:max_tokens] for row in rows]))
    return [*probes, make([beyond])] if beyond > longest else probes


@torch.inference_mode()
def compute_probes(
    network: PackedNetwork, shape: AttentionShape, max_tokens: int, device: torch.device
) -> list[Tensor]:
    """Return the packed network's hidden states [tokens, dim] of each probe."""
    probes = make_probes(network.transformer.config, max_tokens)
    return [
        packed_states(network, pack_batch(probe, shape, shares_prefixes=network.shares_prefixes), device)
        for probe in probes
    ]


# The tokens of a batch as large as in service, and of its sequences.
LARGE_TOKENS: Final = {"cuda": 16_384}
LARGE_TOKENS_ELSEWHERE: Final = 512
LARGE_LENGTH: Final = 32


@torch.inference_mode()
def compute_large(network: PackedNetwork) -> Tensor:
    """Return the packed network's hidden states of a batch as large as in service, of short sequences."""
    config, device = network.transformer.config, next(network.transformer.parameters()).device
    num_sequences = LARGE_TOKENS.get(device.type, LARGE_TOKENS_ELSEWHERE) // LARGE_LENGTH
    batch = make_random_batch(config, [LARGE_LENGTH] * num_sequences, np.random.default_rng(1))
    return packed_states(network, pack_batch(batch, read_attention_shape(config)), device)


def packed_states(network: PackedNetwork, probe: PackedBatch, device: torch.device) -> Tensor:
    return network.hidden_states(
        torch.from_numpy(probe.input_ids).to(device),
        torch.from_numpy(probe.position_ids).to(device),
        torch.from_numpy(probe.cu_seqlens).to(device, torch.int32),
        probe.max_seqlen,
        **{name: torch.from_numpy(array).to(device) for name, array in probe.prefixes.items()},
    )
