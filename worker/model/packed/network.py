"""PackedNetwork: an EncoderNetwork's own weights, run over sequences one after another instead of padded rows.

Packing is compared with padding before it is used: a kernel is only as good as its build, and a wrong mask or
position does not fail, it gives wrong vectors.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from vectormill.domain.errors import ModelError
from worker.batching.batch import Batch
from worker.encoder.padding import pad_batch
from worker.model.architectures import AttentionShape
from worker.model.cuda_pass import is_device_lost
from worker.model.network import EncoderNetwork
from worker.model.packed.attention import register_packed_attention
from worker.model.packed.packing import PackedBatch, pack_batch
from worker.model.pooling import pool_packed_states

# The probe: one token alone, one behind another's end, and one that is long.
PROBE_LENGTHS: Final = (1, 5, 37, 150)
# Another probe exceeds the window of local layers by so many tokens, where the model reads that many: the last ones may
# not see the first ones.
BEYOND_WINDOW: Final = 22
# The least cosine of a token's hidden states with packing and with padding. Two kernels in 16 bit differ by their
# rounding.
SMALLEST_COSINES: Final = {torch.float32: 0.9999}
SMALLEST_COSINE_16_BIT: Final = 0.999


class PackingFailed(Exception):
    """Packed attention does not give what padding gives. The message is the rest of a sentence behind "because"."""


class PackedNetwork(nn.Module):
    """Tokens [tokens] with bounds [n + 1] -> vectors [n, card.dimension] in fp32.

    Takes the network over: its transformer attends by the packed kernel from now on.
    """

    def __init__(self, network: EncoderNetwork, kernel: str) -> None:
        super().__init__()
        register_packed_attention()
        self.transformer = network.transformer
        self.transformer.set_attn_implementation(kernel)
        self.dense = network.dense
        self.modes = network.modes
        self.eval()

    def forward(
        self,
        input_ids: Tensor,  # [tokens]
        position_ids: Tensor,  # [tokens]
        cu_seqlens: Tensor,  # [n + 1] int32
        prompt_lengths: Tensor | None,  # [n]
        max_seqlen: int,
        **tokens: Tensor,  # [tokens], further inputs that the transformer takes
    ) -> Tensor:
        hidden_states = self.hidden_states(input_ids, position_ids, cu_seqlens, max_seqlen, **tokens)
        vectors: Tensor = self.dense(
            pool_packed_states(hidden_states, cu_seqlens, prompt_lengths, self.modes)
        )
        return vectors

    @property
    def attention(self) -> str:
        return str(self.transformer.config._attn_implementation)

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        **tokens: Tensor,
    ) -> Tensor:
        """Return hidden states [tokens, dim]; there is no padding to compute or pool over."""
        states: Tensor = self.transformer(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            cu_seq_lens_q=cu_seqlens,
            max_length_q=max_seqlen,
            **{name: values.unsqueeze(0) for name, values in tokens.items()},
        )[0]
        return states[0]


def pack_network(
    network: EncoderNetwork, kernel: str, shape: AttentionShape, max_tokens: int, device: torch.device
) -> PackedNetwork:
    """Return the network, packed. Raises PackingFailed if it is left unchanged, ModelError if it cannot be."""
    probes = make_probes(network.transformer.config, max_tokens)
    padded_attention = network.attention
    try:
        with torch.inference_mode():
            expected = [_padded_states(network, probe, device) for probe in probes]
            packed = PackedNetwork(network, kernel)
            for probe, states in zip(probes, expected, strict=True):
                _compare(states, packed_states(packed, pack_batch(probe, shape), device))
    except Exception as error:
        if device.type == "cuda" and is_device_lost():
            raise ModelError(
                f"Packed attention broke {device} for this process ({first_line(error)}); ask for padded attention."
            ) from error
        network.transformer.set_attn_implementation(padded_attention)
        if isinstance(error, PackingFailed):
            raise
        # A kernel that is missing or refuses a shape raises anything; the padded one still runs.
        raise PackingFailed(f"packed attention failed: {first_line(error)}") from error
    return packed


def first_line(error: Exception) -> str:
    """Return the first line of an error, with the second if the first only announces it."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def _compare(expected: Tensor, found: Tensor) -> None:
    cosine = float(cosine_similarity(expected.float(), found.float(), dim=-1).min())
    # Written so that NaN fails too.
    if not cosine >= SMALLEST_COSINES.get(expected.dtype, SMALLEST_COSINE_16_BIT):
        raise PackingFailed(f"packed attention deviates from padding: the smallest cosine is {cosine:.4f}")


def make_probes(config: Any, max_tokens: int) -> list[Batch]:
    """Return the same test batches on every machine. The longest sequence is alone, without padding others."""
    tokens = np.random.default_rng(0)

    def make(lengths: Iterable[int]) -> Batch:
        return Batch.from_ids(
            [tokens.integers(0, config.vocab_size, length).astype(np.int32) for length in lengths]
        )

    longest = min(max(PROBE_LENGTHS), max_tokens)
    beyond = min(find_largest_window(config) + BEYOND_WINDOW, max_tokens)
    probes = [make(min(length, max_tokens) for length in PROBE_LENGTHS)]
    return [*probes, make([beyond])] if beyond > longest else probes


def find_largest_window(config: Any) -> int:
    """Return the largest window of the layers, in tokens; 0 if every layer sees all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return 0
    windows = (getattr(config, name, None) for name in ("sliding_window", "local_attention"))
    return max((int(window) for window in windows if window), default=0)


def _padded_states(network: EncoderNetwork, probe: Batch, device: torch.device) -> Tensor:
    """Return [tokens, dim] of the padded forward pass, without the padding."""
    padded = pad_batch(probe, network.pad_token_id)
    attention_mask = torch.from_numpy(padded.attention_mask).to(device)
    states: Tensor = network.transformer(
        input_ids=torch.from_numpy(padded.input_ids).to(device), attention_mask=attention_mask
    )[0]
    return states[attention_mask.bool()]


@torch.inference_mode()
def compute_probes(
    network: PackedNetwork, shape: AttentionShape, max_tokens: int, device: torch.device
) -> list[Tensor]:
    """Return the packed hidden states [tokens, dim] of each probe."""
    probes = make_probes(network.transformer.config, max_tokens)
    return [packed_states(network, pack_batch(probe, shape), device) for probe in probes]


def packed_states(network: PackedNetwork, probe: PackedBatch, device: torch.device) -> Tensor:
    return network.hidden_states(
        torch.from_numpy(probe.input_ids).to(device),
        torch.from_numpy(probe.position_ids).to(device),
        torch.from_numpy(probe.cu_seqlens).to(device, torch.int32),
        probe.max_seqlen,
    )
