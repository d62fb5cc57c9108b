"""RexNetwork: RexUniNLU's DeBERTa-v2 with its rotary head, from its published layout. Knows no texts and no cells.

The published model changes DeBERTa in its positions: they come with the tokens and restart in every path and every type
of a hint, and so relative positions differ from sequence to sequence.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from vectormill.domain.tasks.prompt_size import MAX_WINDOW_TOKENS
from vectormill.models.weight_files import find_weights
from vectormill.models.weight_headers import read_header
from worker.model.weights.stored import open_weights
from worker.tasks.extract.model.deberta import DebertaEncoder, Embeddings
from worker.tasks.extract.model.switches import Switches, read_switches, tabulate_distances

# Written by older versions of transformers: the numbers 0, 1, 2, …, which nothing reads.
IGNORED_KEYS: Final = frozenset({"plm.embeddings.position_ids"})


class RotaryFrequencies(nn.Module):
    """The angles of one position, [hidden / 2]; the file has them."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.empty(hidden_size // 2), requires_grad=False)


class RexNetwork(nn.Module):
    """Padded token inputs [n, length] -> logits [n, length, length] in fp32, of which padding's mean nothing."""

    def __init__(self, switches: Switches) -> None:
        super().__init__()
        size = switches.hidden_size
        self.plm = nn.ModuleDict({"embeddings": Embeddings(switches), "encoder": DebertaEncoder(switches)})
        self.ffnq, self.ffnk = nn.Linear(size, size), nn.Linear(size, size)
        self.rotary_emb = RotaryFrequencies(size)
        self._numbers = tabulate_distances(switches, MAX_WINDOW_TOKENS)
        self._table: Tensor | None = None  # the same, on the device
        self.eval()

    def prepare(self, device: torch.device, whole: Callable[[Tensor], Tensor] = lambda part: part) -> None:
        """Compute what all batches share. Call once, after the weights are on their device.

        `whole` makes a parameter of what is here of it, where several devices share them.
        """
        with torch.no_grad():
            self.plm["encoder"].project_positions(whole)
        self._table = torch.from_numpy(self._numbers).to(device)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        prefix_blocks: Tensor,
        type_segments: Tensor,
        is_token: Tensor,
        received: Tensor | None = None,
    ) -> Tensor:
        """Return logits (head, tail), (head, type) and (type, tail); `is_token` is bool.

        `received` are hidden states [n, length, hidden] in place of embeddings, where the layers before these are
        elsewhere; and hidden states are the answer where the head is.
        """
        hidden_states = self.encode(
            input_ids, token_type_ids, position_ids, prefix_blocks, type_segments, is_token, received
        )
        if not isinstance(self.ffnq, nn.Linear):
            return hidden_states
        query, key = (self._rotate(ffn(hidden_states), position_ids) for ffn in (self.ffnq, self.ffnk))
        return query @ key.transpose(-1, -2)

    def encode(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        prefix_blocks: Tensor,
        type_segments: Tensor,
        is_token: Tensor,
        received: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [n, length, hidden]; `received` as of forward."""
        embedded = received
        if embedded is None:
            embedded = self.plm["embeddings"](input_ids, token_type_ids, position_ids)
        index, columns = self._index_distances(position_ids)
        is_hidden = ~(_see(prefix_blocks) & _see(type_segments) & is_token[:, None, :])
        states: Tensor = self.plm["encoder"](embedded, index, columns, is_hidden, is_token[:, :, None])
        return states

    def _index_distances(self, position_ids: Tensor) -> tuple[Tensor, slice]:
        """Return the numbers of the relative embeddings for all distances that occur at this length."""
        assert self._table is not None, "prepare() comes first"
        middle = len(self._numbers) // 2
        farthest = min(_find_farthest(position_ids), middle)
        # The numbers ascend, so that those of the farthest distances are the first and the last.
        first, last = (int(self._numbers[middle + side * farthest]) for side in (-1, 1))
        distances = position_ids[:, :, None] - position_ids[:, None, :]
        distances = distances.clamp_(-farthest, farthest).add_(
            middle
        )  # 8 bytes each: no copy more than it takes
        return self._table[distances].sub_(first), slice(first, last + 1)

    def _rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Turn each two neighbouring numbers of [n, length, hidden] by the angle of their position, in fp32."""
        angles = position_ids[:, :, None].float() * self.rotary_emb.freqs.float()
        cosines, sines = angles.cos(), angles.sin()
        even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cosines - odd * sines, odd * cosines + even * sines), dim=-1).flatten(2)


def load_network(directory: Path, dtype: torch.dtype, device: torch.device) -> RexNetwork:
    """Load the network from a safetensors file, or else from `pytorch_model.bin`, of which only tensors are read.

    Raises ModelError when the configuration has a switch that is not known, or when tensors are missing, left over or
    of another shape.
    """
    network = outline_network(directory, read_switches(directory), dtype)
    with open_weights(_find_file(directory)) as file:
        network.load_state_dict(
            {
                key: file.get_tensor(key).to(device=device, dtype=outlined.dtype)
                for key, outlined in network.state_dict().items()
            },
            assign=True,
        )
    network.requires_grad_(False)
    network.prepare(device)
    return network


def outline_network(directory: Path, switches: Switches, dtype: torch.dtype) -> RexNetwork:
    """Return the network without weights, to compare names and shapes with the files. Raises ModelError."""
    with torch.device("meta"):
        network = RexNetwork(switches)
    network.to(dtype)
    network.rotary_emb.float()
    wanted = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    found = {key: header.shape for key, header in read_header(_find_file(directory)).items()}
    _check_keys(wanted, found, directory)
    network.requires_grad_(False)
    return network


def _find_farthest(position_ids: Tensor) -> int:
    """Return a bound on all distances. On a GPU it is the number of tokens, so that nothing waits. On a processor it is
    looked up, since positions restart in every type and a prompt of many types has a few dozen.
    """
    length: int = position_ids.shape[1]
    return length if position_ids.device.type != "cpu" else int(position_ids.max())


def _see(groups: Tensor) -> Tensor:
    """Return [n, length, length], True for tokens of one group, and for tokens of none with all."""
    rows, columns = groups[:, :, None], groups[:, None, :]
    return (rows == columns) | (rows == 0) | (columns == 0)


def _find_file(directory: Path) -> Path:
    (path,) = find_weights(directory, directory.name)
    return path


def _check_keys(
    own: Mapping[str, tuple[int, ...]], tensors: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    missing = sorted(own.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - own.keys() - IGNORED_KEYS)
    reshaped = sorted(key for key in own.keys() & tensors.keys() if own[key] != tensors[key])
    found = {"are missing": missing, "belong to no part of it": surplus, "have another shape": reshaped}
    if any(found.values()):
        lists = (
            f"{', '.join(keys[:8])}{' …' * (len(keys) > 8)} {what}" for what, keys in found.items() if keys
        )
        raise ModelError(
            f"The weights in {directory} do not fit RexUniNLU as its config.json says: {'; '.join(lists)}."
        )
