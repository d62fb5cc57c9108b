"""RexNetwork: RexUniNLU's DeBERTa-v2 with its rotary head, from its published layout. Knows no texts and no cells.

The published model changes DeBERTa in its positions: they come with the tokens and restart in every path and every type
of a hint, and so relative positions differ from sequence to sequence.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from vectormill.domain.tasks.prompt_size import MAX_WINDOW_TOKENS
from worker.tasks.extract.model.deberta import Embeddings, Encoder
from worker.tasks.extract.model.switches import Switches, read_switches, tabulate_distances

# Written by older versions of transformers: the numbers 0, 1, 2, …, which nothing reads.
IGNORED_KEYS: Final = frozenset({"plm.embeddings.position_ids"})
WEIGHTS: Final = "model.safetensors"
PICKLED_WEIGHTS: Final = "pytorch_model.bin"


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
        self.plm = nn.ModuleDict({"embeddings": Embeddings(switches), "encoder": Encoder(switches)})
        self.ffnq, self.ffnk = nn.Linear(size, size), nn.Linear(size, size)
        self.rotary_emb = RotaryFrequencies(size)
        self._numbers = tabulate_distances(switches, MAX_WINDOW_TOKENS)
        self._table: Tensor | None = None  # the same, on the device
        self.eval()

    def prepare(self) -> None:
        """What is the same for every batch. Once, after the weights are in their place and on their device."""
        with torch.inference_mode():
            self.plm["encoder"].project_positions()
        self._table = torch.from_numpy(self._numbers).to(self.ffnq.weight.device)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        prefix_blocks: Tensor,
        type_segments: Tensor,
        is_token: Tensor,
    ) -> Tensor:
        """Logits (head, tail), (head, type) and (type, tail); `is_token` is bool."""
        hidden_states = self.encode(
            input_ids, token_type_ids, position_ids, prefix_blocks, type_segments, is_token
        )
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
    ) -> Tensor:
        """The last hidden states [n, length, hidden]."""
        embedded = self.plm["embeddings"](input_ids, token_type_ids, position_ids)
        index, columns = self._index_distances(position_ids)
        is_hidden = ~(_see(prefix_blocks) & _see(type_segments) & is_token[:, None, :])
        states: Tensor = self.plm["encoder"](embedded, index, columns, is_hidden, is_token[:, :, None])
        return states

    def _index_distances(self, position_ids: Tensor) -> tuple[Tensor, slice]:
        """The number of each distance's relative embedding among those that a sequence of this length can have."""
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
        """Turns each two neighbouring numbers by the angle of their position, in fp32. [n, length, hidden]"""
        angles = position_ids[:, :, None].float() * self.rotary_emb.freqs.float()
        cosines, sines = angles.cos(), angles.sin()
        even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cosines - odd * sines, odd * cosines + even * sines), dim=-1).flatten(2)


def load_network(directory: Path, dtype: torch.dtype, device: torch.device) -> RexNetwork:
    """From `model.safetensors`, or else from `pytorch_model.bin`, of which tensors alone are read.

    Raises ModelError when the configuration has a switch that is not known, or when tensors are missing, left over or
    of another shape.
    """
    switches = read_switches(directory)
    with torch.device("meta"):
        network = RexNetwork(switches)
    network.to(dtype)
    network.rotary_emb.float()
    tensors = _read_tensors(directory)
    _check_keys(network.state_dict(), tensors, directory)
    own = network.state_dict()
    network.load_state_dict(
        {key: tensors[key].to(device=device, dtype=own[key].dtype) for key in own}, assign=True
    )
    network.requires_grad_(False)
    network.prepare()
    return network


def _find_farthest(position_ids: Tensor) -> int:
    """No distance is greater. A GPU is not waited for: no position is beyond the number of tokens. On a processor it
    is looked up, since positions restart in every type and a prompt of many types has a few dozen.
    """
    length: int = position_ids.shape[1]
    return length if position_ids.device.type != "cpu" else int(position_ids.max())


def _see(groups: Tensor) -> Tensor:
    """[n, length] -> [n, length, length]: tokens of one group, and tokens of none with all."""
    rows, columns = groups[:, :, None], groups[:, None, :]
    return (rows == columns) | (rows == 0) | (columns == 0)


def _read_tensors(directory: Path) -> Mapping[str, Tensor]:
    if (directory / WEIGHTS).is_file():
        return load_file(directory / WEIGHTS)
    path = directory / PICKLED_WEIGHTS
    try:
        tensors: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a pickle that holds more than tensors makes torch raise
        raise ModelError(
            f"{directory} has no {WEIGHTS}, and the tensors of {PICKLED_WEIGHTS} cannot be read: {error}"
        ) from error
    return tensors


def _check_keys(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], directory: Path) -> None:
    missing = sorted(own.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - own.keys() - IGNORED_KEYS)
    reshaped = sorted(key for key in own.keys() & tensors.keys() if own[key].shape != tensors[key].shape)
    found = {"are missing": missing, "belong to no part of it": surplus, "have another shape": reshaped}
    if any(found.values()):
        lists = (
            f"{', '.join(keys[:8])}{' …' * (len(keys) > 8)} {what}" for what, keys in found.items() if keys
        )
        raise ModelError(
            f"The weights in {directory} do not fit RexUniNLU as its config.json says: {'; '.join(lists)}."
        )
