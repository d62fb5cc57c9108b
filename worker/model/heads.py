"""The sparse and multi-vector heads of a network, each on the hidden states of some tokens.

A head gets states [tokens, hidden size] without padding, and the numbers of tokens of the sequences that they belong
to. All shapes follow from these, so that nothing waits for the device.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vectormill.domain.errors import ModelError
from vectormill.domain.task import MULTI_VECTOR, SPARSE
from vectormill.models.model_card import ModelCard, SparseHead
from vectormill.models.weights import find_weights
from worker.model.runtime import transformers
from worker.model.weights import read_tensors

# The most numbers of tokens for words that are held at once: 64 MiB in fp32.
MOST_LOGITS: Final = 1 << 24


class TokenWeights(nn.Module):
    """A weight for each token, float32 [tokens]: bge-m3's sparse head.

    It has one output, so that fp32 costs nothing.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        weights: Tensor = self.linear(states.float()).relu().squeeze(-1)
        return weights


class TokenVectors(nn.Module):
    """A vector for each token, float16 [tokens, card.token_dimensions]."""

    def __init__(self, layers: nn.Module, *, normalizes: bool) -> None:
        super().__init__()
        self.layers = layers
        self.normalizes = normalizes

    def forward(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        vectors: Tensor = self.layers(states).float()
        return (normalize(vectors, dim=-1) if self.normalizes else vectors).half()


class WordWeights(nn.Module):
    """A weight for each word of the vocabulary, float32 [n, words]: SPLADE.

    The language model's head gives numbers [tokens, words], of which only some rows are held at once. Of the sources,
    sentence_transformers/sparse_encoder/modules/splade_pooling.py applies the logarithm to each; since it grows with
    its argument, the largest number is found first here.
    """

    def __init__(self, whole: nn.Module, head: SparseHead, num_words: int) -> None:
        """Take the head of a masked language model, which loses its transformer."""
        super().__init__()
        self._given = GivenStates()
        setattr(whole, str(whole.base_model_prefix), self._given)
        self.whole = whole
        self.head = head
        self.num_words = num_words

    def forward(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        least = 0.0 if self.head.sums else float("-inf")
        totals = torch.full((len(lengths), self.num_words), least, device=states.device)
        bounds = list(pairwise(accumulate(lengths, initial=0)))
        size = max(MOST_LOGITS // self.num_words, 1)
        for first in range(0, len(states), size):
            self._given.states = states[first : first + size].unsqueeze(0)
            logits = self.whole(inputs_embeds=self._given.states).logits[0]
            for row, (start, end) in enumerate(bounds):
                if start < first + size and end > first:
                    self._add(totals[row], logits[max(start - first, 0) : end - first])
            del logits  # before the next are computed
        return totals if self.head.sums else self._weigh(totals)

    def _add(self, total: Tensor, logits: Tensor) -> None:
        if self.head.sums:
            total += self._weigh(logits.float()).sum(dim=0)
        else:
            torch.maximum(total, logits.amax(dim=0).float(), out=total)

    def _weigh(self, numbers: Tensor) -> Tensor:
        weights = numbers.relu()
        for _ in range(self.head.num_logs):
            weights = weights.log1p()
        return weights


class GivenStates(nn.Module):
    """A module that replaces a transformer and returns the hidden states it was given."""

    states: Tensor

    def forward(self, *_: object, **__: object) -> object:
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.states)


def load_heads(
    card: ModelCard, whole: nn.Module, dtype: torch.dtype, dense: Sequence[nn.Module]
) -> nn.ModuleDict:
    """Return the heads of a model by the output that each makes.

    `whole` is what was loaded of its own weights, and `dense` the Dense modules of its token head.
    """
    heads: dict[str, nn.Module] = {}
    if card.sparse_head is not None and card.sparse_head.file:
        heads[SPARSE] = TokenWeights(_load_linear(card, card.sparse_head.file, "").float())
    elif card.sparse_head is not None:
        heads[SPARSE] = WordWeights(whole, card.sparse_head, card.sparse_dimensions)
    if card.token_head is not None:
        layers = (
            nn.Sequential(*dense)
            if dense
            else _load_linear(card, card.token_head.file, card.token_head.prefix)
        )
        heads[MULTI_VECTOR] = TokenVectors(layers.to(dtype), normalizes=card.token_head.normalizes)
    return nn.ModuleDict(heads)


def _load_linear(card: ModelCard, file: str, prefix: str) -> nn.Linear:
    """Return the linear layer whose tensors have this prefix; its bias may be missing."""
    names = {f"{prefix}weight", f"{prefix}bias"}
    paths = [card.path / file] if file else find_weights(card.path, card.name)
    found = {
        name.removeprefix(prefix): each for name, each in read_tensors(paths, names.__contains__).items()
    }
    if "weight" not in found:
        raise ModelError(
            f"The weights in {card.path} lack {prefix}weight, a head of the model {card.name!r}."
        )
    num_outputs, num_inputs = found["weight"].shape
    linear = nn.Linear(num_inputs, num_outputs, bias="bias" in found)
    linear.load_state_dict(found)
    return linear
