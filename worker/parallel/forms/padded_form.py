"""PaddedForm: sequences as rows that are as long as the longest of them."""

from collections.abc import Sequence

from torch import Tensor, nn

from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.encoder.padding import pad_batch
from worker.model.masks import find_attention_mask
from worker.model.network import find_pad_token_id
from worker.model.pooling import pool_hidden_states
from worker.parallel.forms.form import Form, Part, Tensors

ATTENTION_MASK = "attention_mask"
POOL_MASK = "pool_mask"


class PaddedForm(Form):
    """`token_inputs` are those that this rank's part of the transformer reads; a later stage reads none."""

    def __init__(self, transformer: nn.Module, token_inputs: Sequence[str], modes: Sequence[str]) -> None:
        self._transformer = transformer
        self._token_inputs = token_inputs
        self._modes = modes
        self._kernel = str(transformer.config._attn_implementation)
        self._pad_token_id = find_pad_token_id(transformer.config.to_dict())

    @property
    def attention(self) -> str:
        return f"padded ({self._kernel})"

    @property
    def kernel(self) -> str:
        return self._kernel

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
