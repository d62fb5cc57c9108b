"""WordlessNetwork: an EncoderNetwork that is given the embeddings of its words. Writes the table it was freed of."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from worker.encoder.choice import COMPRESSED
from worker.model.network import EncoderNetwork
from worker.model.weights import RoundedEmbedding, is_compressible_table
from worker.tokens.tokenized import TOKEN_TYPE_IDS

ROWS_AT_ONCE: Final = 4096


class WordlessNetwork(nn.Module):
    """A network with one more input: the embeddings [n, length, dim] of the ids.

    The ids are still an input, because some architectures make positions of them. The network itself can be used only
    through this one from now on.
    """

    def __init__(self, network: EncoderNetwork) -> None:
        super().__init__()
        # Not a module of this one, so that whoever walks through it finds no table.
        self._lookup = (network.transformer.get_input_embeddings(),)
        self._given = GivenEmbeddings()
        network.transformer.set_input_embeddings(self._given)
        self.network = network

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pool_mask: Tensor,
        word_embeddings: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        self._given.embeddings = word_embeddings
        tokens = {} if token_type_ids is None else {TOKEN_TYPE_IDS: token_type_ids}
        vectors: Tensor = self.network(input_ids, attention_mask, pool_mask, **tokens)
        return vectors

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the rows [n, length, dim] of ids [n, length], scaled where the architecture does so."""
        embeddings: Tensor = self._lookup[0](input_ids)
        return embeddings

    def write_table(self, path: Path, precision: str) -> int:
        """Write what `embed` answers for each id, in fp32, with weights in `precision`. Return the dim."""
        (lookup,) = self._lookup
        num_rows, dim = lookup.weight.shape
        if precision in COMPRESSED and is_compressible_table(lookup):
            rounded = RoundedEmbedding(lookup.weight.shape, torch.float32)
            rounded.hold(lookup.weight)
            lookup = rounded
        with path.open("wb") as file:
            for ids in torch.arange(num_rows).split(ROWS_AT_ONCE):
                file.write(lookup(ids).numpy().tobytes())
        return int(dim)


class GivenEmbeddings(nn.Module):
    """Stands where words were looked up, and answers what it was given."""

    embeddings: Tensor

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embeddings
