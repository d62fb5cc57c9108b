"""The two forms in which a transformer computes a batch, padded and packed.

A transformer is whole, or the part that a rank of a shared model has: a strategy decides what of a batch it is given.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.encoder.choice import AttentionShape
from worker.encoder.padding import pad_batch
from worker.model.masks import find_attention_mask
from worker.model.network import find_pad_token_id
from worker.model.packed import pack_batch
from worker.model.pooling import pool_hidden_states, pool_packed_states

# Arrays of a part on the device, by name.
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a batch as one forward pass takes them, still on the host.

    `shape` is that of the token ids, and, with the hidden size behind it, of the hidden states that stages pass on:
    every rank knows it without being told.
    """

    arrays: Mapping[str, NDArray[np.int64]]
    shape: tuple[int, ...]
    max_seqlen: int


class Form(Protocol):
    """One form of batches for a rank's transformer, whole or a part of it.

    A transformer that is cut is called by all ranks
    at once."""

    @property
    @abstractmethod
    def attention(self) -> str:
        """Return the kernel as an EncoderReport names it."""

    @abstractmethod
    def lay_out(self, batch: Batch) -> Part:
        """Return the sequences as arrays. Asks no device and no other rank."""

    @abstractmethod
    def run(self, part: Part, tensors: Tensors, received: Tensor | None) -> Tensor:
        """Return hidden states [*part.shape, hidden size] of this rank's layers, given those of the stage before."""

    @abstractmethod
    def pool(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return pooled vectors [n, hidden size * number of modes] in fp32."""

    @abstractmethod
    def of_tokens(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return [tokens, hidden size]: without padding, one sequence behind the other."""


ATTENTION_MASK = "attention_mask"
POOL_MASK = "pool_mask"


class PaddedForm(Form):
    """Sequences as rows, as long as the longest of them.

    `token_inputs` are those that this rank's part of the transformer reads; a later stage reads none."""

    def __init__(self, transformer: nn.Module, token_inputs: Sequence[str], modes: Sequence[str]) -> None:
        self._transformer = transformer
        self._token_inputs = token_inputs
        self._modes = modes
        self._kernel = str(transformer.config._attn_implementation)
        self._pad_token_id = find_pad_token_id(transformer.config.to_dict())

    @property
    def attention(self) -> str:
        return f"padded ({self._kernel})"

    def lay_out(self, batch: Batch) -> Part:
        padded = pad_batch(batch, self._pad_token_id)
        arrays = {name: padded.tokens[name] for name in self._token_inputs if name in padded.tokens}
        mask = find_attention_mask(padded, self._transformer.config)
        if mask is not None:
            arrays[ATTENTION_MASK] = mask
        if mask is None or padded.pool_mask is not padded.attention_mask:
            arrays[POOL_MASK] = padded.pool_mask
        return Part(arrays, padded.attention_mask.shape, batch.max_length)

    def run(self, part: Part, tensors: Tensors, received: Tensor | None) -> Tensor:
        inputs = {name: tensors[name] for name in (*TOKEN_INPUTS, ATTENTION_MASK) if name in tensors}
        if received is not None:
            inputs["inputs_embeds"] = received
        states: Tensor = self._transformer(**inputs)[0]
        return states

    def pool(self, states: Tensor, tensors: Tensors) -> Tensor:
        return pool_hidden_states(states, _find_pool_mask(tensors), self._modes)

    def of_tokens(self, states: Tensor, tensors: Tensors) -> Tensor:
        """Return the states of the pooled tokens: without prompts, of all."""
        return states[_find_pool_mask(tensors).bool()]


def _find_pool_mask(tensors: Tensors) -> Tensor:
    """Return the pool mask, which is the attention mask if there is none."""
    return tensors[POOL_MASK] if POOL_MASK in tensors else tensors[ATTENTION_MASK]


POSITION_IDS = "position_ids"
CU_SEQLENS = "cu_seqlens"
PROMPT_LENGTHS = "prompt_lengths"


class PackedForm(Form):
    """Sequences one behind the other, told apart by their bounds; no padding is computed or passed on.

    Every rank that computes a sequence has the same bounds for it, whichever heads or layers are its own.

    `token_inputs` as of PaddedForm. To be run while the transformer attends by `kernel`.
    """

    def __init__(
        self,
        transformer: nn.Module,
        token_inputs: Sequence[str],
        modes: Sequence[str],
        shape: AttentionShape,
        kernel: str,
    ) -> None:
        self._transformer = transformer
        self._token_inputs = token_inputs
        self._modes = modes
        self._shape = shape
        self._kernel = kernel

    @property
    def attention(self) -> str:
        return f"packed ({self._kernel})"

    def lay_out(self, batch: Batch) -> Part:
        packed = pack_batch(batch, self._shape)
        arrays = {name: packed.tokens[name] for name in self._token_inputs if name in packed.tokens}
        arrays |= {POSITION_IDS: packed.position_ids, CU_SEQLENS: packed.cu_seqlens}
        if packed.prompt_lengths is not None:
            arrays[PROMPT_LENGTHS] = packed.prompt_lengths
        return Part(arrays, packed.input_ids.shape, packed.max_seqlen)

    def run(self, part: Part, tensors: Tensors, received: Tensor | None) -> Tensor:
        """Return [tokens, hidden size]; transformers have a batch of one row."""
        inputs: dict[str, Any] = {
            name: tensors[name].unsqueeze(0) for name in (*TOKEN_INPUTS, POSITION_IDS) if name in tensors
        }
        if received is not None:
            inputs["inputs_embeds"] = received.unsqueeze(0)
        states: Tensor = self._transformer(
            **inputs, cu_seq_lens_q=tensors[CU_SEQLENS].int(), max_length_q=part.max_seqlen
        )[0]
        return states[0]

    def pool(self, states: Tensor, tensors: Tensors) -> Tensor:
        bounds = tensors[CU_SEQLENS].int()
        return pool_packed_states(states, bounds, tensors.get(PROMPT_LENGTHS), self._modes)

    def of_tokens(self, states: Tensor, tensors: Tensors) -> Tensor:
        return states
