"""The two layouts ("forms") in which a transformer computes a batch: padded and packed.

The transformer may be whole, or the part of it that one rank of a shared model holds; the strategy decides
which sequences of a batch it gets.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vectormill.domain.task import DENSE
from vectormill.models.model_card import ModelCard
from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.encoder.choice import AttentionShape
from worker.encoder.outputs import POOLED, POOLED_BOUNDS, WantedOutputs, find_wanted
from worker.encoder.padding import pad_batch
from worker.model.masks import find_attention_mask
from worker.model.network import find_pad_token_id
from worker.model.packed import pack_batch
from worker.model.pooling import pool_hidden_states, pool_packed_states
from worker.model.prefixes import ROWS_OF_TOKENS, TOKENS_OF_ROWS

# A part's arrays on the device, by name.
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a batch in the layout of one forward pass, still on the host.

    `shape` is that of the token ids and, with the hidden size appended, of the hidden states that pipeline
    stages exchange: so every rank knows it without communication.
    """

    arrays: Mapping[str, NDArray[np.int64]]
    shape: tuple[int, ...]
    max_seqlen: int


class Form(Protocol):
    """A batch layout for one rank's transformer, which may be whole or a part of the model.

    If the transformer is sharded, all ranks must call it at once.
    """

    modes: Sequence[str]

    @property
    @abstractmethod
    def attention(self) -> str:
        """Return the attention kernel by its name in an EncoderReport."""

    @abstractmethod
    def lay_out(self, batch: Batch) -> Part:
        """Return the sequences as host arrays. Communicates with no device and no other rank."""

    @abstractmethod
    def run(self, part: Part, tensors: Tensors, received: Tensor | None) -> Tensor:
        """Return hidden states [*part.shape, hidden size] after this rank's layers.

        `received` are the hidden states from the previous stage, if there is one.
        """

    @abstractmethod
    def pool(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return pooled vectors [n, hidden size * number of modes] in fp32."""

    @abstractmethod
    def of_tokens(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return hidden states [tokens, hidden size] without padding, sequence after sequence."""


def lay_out_outputs(form: Form, batch: Batch, card: ModelCard) -> tuple[Part, WantedOutputs | None]:
    """Return the sequences as host arrays, with the places that heads read, and the outputs that are asked for."""
    part = form.lay_out(batch)
    wanted = find_wanted(batch, card, part.shape)
    return (part if wanted is None else replace(part, arrays={**part.arrays, **wanted.places})), wanted


def compute_outputs(
    form: Form,
    dense: nn.Module,
    heads: nn.ModuleDict,
    wanted: WantedOutputs | None,
    states: Tensor,
    tensors: Tensors,
) -> Tensor:
    """Return vectors [n, dim] of a part, or all wanted outputs as bytes, one after another.

    `dense` follows the pooled states, and `heads` are those of further outputs by name.
    """
    if wanted is None:
        vectors: Tensor = dense(form.pool(states, tensors)).float()
        return vectors
    flat = states.flatten(0, -2)
    outputs = []
    for name in wanted.wants:
        if name == DENSE:
            outputs.append(dense(form.pool(states, tensors)).float())
        elif name == POOLED:
            pooled = pool_packed_states(flat[tensors[name]], tensors[POOLED_BOUNDS].int(), None, form.modes)
            outputs.append(dense(pooled).float())
        else:
            outputs.append(heads[name](flat[tensors[name]], wanted.lengths[name].tolist()))
    return torch.cat([output.contiguous().view(torch.uint8).flatten() for output in outputs])


ATTENTION_MASK = "attention_mask"
POOL_MASK = "pool_mask"


@dataclass(frozen=True)
class PaddedForm(Form):
    """The layout with one row per sequence, padded to the longest.

    `token_inputs` are the inputs that this rank's part of the transformer reads; later stages read none. No token
    attends to the tokens `unattended` at the end of a text.
    """

    transformer: nn.Module
    token_inputs: Sequence[str]
    modes: Sequence[str]
    unattended: int | None = None

    @property
    def attention(self) -> str:
        return f"padded ({self.transformer.config._attn_implementation})"

    @cached_property
    def pad_token_id(self) -> int:
        return find_pad_token_id(self.transformer.config.to_dict())

    def lay_out(self, batch: Batch) -> Part:
        padded = pad_batch(batch, self.pad_token_id, unattended=self.unattended)
        arrays = {name: padded.tokens[name] for name in self.token_inputs if name in padded.tokens}
        mask = find_attention_mask(padded, self.transformer.config)
        if mask is not None:
            arrays[ATTENTION_MASK] = mask
        if mask is None or padded.pool_mask is not padded.attention_mask:
            arrays[POOL_MASK] = padded.pool_mask
        return Part(arrays, padded.attention_mask.shape, batch.max_length)

    def run(self, part: Part, tensors: Tensors, received: Tensor | None) -> Tensor:
        inputs = {name: tensors[name] for name in (*TOKEN_INPUTS, ATTENTION_MASK) if name in tensors}
        if received is not None:
            inputs["inputs_embeds"] = received
        states: Tensor = self.transformer(**inputs)[0]
        return states

    def pool(self, states: Tensor, tensors: Tensors) -> Tensor:
        return pool_hidden_states(states, _find_pool_mask(tensors), self.modes)

    def of_tokens(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return the hidden states of all pooled tokens; without prompts these are all tokens."""
        return states[_find_pool_mask(tensors).bool()]


def _find_pool_mask(tensors: Tensors) -> Tensor:
    """Return the pooling mask, or the attention mask if there is none."""
    return tensors[POOL_MASK] if POOL_MASK in tensors else tensors[ATTENTION_MASK]


POSITION_IDS = "position_ids"
CU_SEQLENS = "cu_seqlens"
PROMPT_LENGTHS = "prompt_lengths"


@dataclass(frozen=True)
class PackedForm(Form):
    """The layout with sequences one after another, so that no padding is computed or sent.

    Every rank that computes a sequence uses the same bounds for it, whatever heads or layers it holds.
    `token_inputs` are those of PaddedForm. The transformer must attend with `kernel` while this form runs. If it
    `shares_prefixes`, a prefix that sequences share is computed once; the model must be causal and on one device.
    """

    transformer: nn.Module
    token_inputs: Sequence[str]
    modes: Sequence[str]
    shape: AttentionShape
    kernel: str
    shares_prefixes: bool = False

    @property
    def attention(self) -> str:
        return f"packed ({self.kernel})"

    def lay_out(self, batch: Batch) -> Part:
        packed = pack_batch(batch, self.shape, shares_prefixes=self.shares_prefixes)
        arrays = {name: packed.tokens[name] for name in self.token_inputs if name in packed.tokens}
        arrays |= {POSITION_IDS: packed.position_ids, CU_SEQLENS: packed.cu_seqlens, **packed.prefixes}
        if packed.prompt_lengths is not None:
            arrays[PROMPT_LENGTHS] = packed.prompt_lengths
        return Part(arrays, (batch.num_tokens,), packed.max_seqlen)

    def run(self, part: Part, tensors: Tensors, received: Tensor | None) -> Tensor:
        """Return hidden states [tokens, hidden size]; transformers itself sees a batch with one row."""
        inputs: dict[str, Any] = {
            name: tensors[name].unsqueeze(0) for name in (*TOKEN_INPUTS, POSITION_IDS) if name in tensors
        }
        if received is not None:
            inputs["inputs_embeds"] = received.unsqueeze(0)
        prefixes = {name: tensors[name] for name in (ROWS_OF_TOKENS, TOKENS_OF_ROWS) if name in tensors}
        states: Tensor = self.transformer(
            **inputs, **prefixes, cu_seq_lens_q=tensors[CU_SEQLENS].int(), max_length_q=part.max_seqlen
        )[0]
        return states[0][prefixes[ROWS_OF_TOKENS]] if prefixes else states[0]

    def pool(self, states: Tensor, tensors: Tensors) -> Tensor:
        bounds = tensors[CU_SEQLENS].int()
        return pool_packed_states(states, bounds, tensors.get(PROMPT_LENGTHS), self.modes)

    def of_tokens(self, states: Tensor, tensors: Tensors) -> Tensor:
        return states
