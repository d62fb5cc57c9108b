"""PackedForm: sequences one behind the other, told apart by their bounds; no padding is computed or passed on."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.model.architectures import AttentionShape
from worker.model.packed.packing import pack_batch
from worker.model.pooling import pool_packed_states
from worker.parallel.forms.form import Form, Part, Tensors

POSITION_IDS = "position_ids"
CU_SEQLENS = "cu_seqlens"
PROMPT_LENGTHS = "prompt_lengths"


class PackedForm(Form):
    """Every rank that computes a sequence has the same bounds for it, whichever heads or layers are its own.

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

    @property
    def kernel(self) -> str:
        return self._kernel

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
