"""Pipeline parallelism: each rank runs consecutive layers, and micro-batches pass through the ranks."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vectormill.models.families import Layout
from worker.batching.batch import Batch
from worker.placement.placement import Rank


class PassthroughEmbeddings(nn.Module):
    """A module in place of a later stage's embeddings, which passes received hidden states to the layers."""

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any
    ) -> Tensor:
        assert inputs_embeds is not None
        return inputs_embeds


def cut_stage(transformer: nn.Module, layout: Layout, rank: Rank) -> None:
    """Reduce the model to this rank's stage: its layers, and its embeddings, norm or head if it has them."""
    first, count = rank.first_layer, rank.stage_layers[rank.number]
    parent_path, _, name = layout.layers.rpartition(".")
    parent = transformer.get_submodule(parent_path)
    setattr(parent, name, getattr(parent, name)[first : first + count])
    _cut_config(transformer, first, count)
    if not rank.is_first:
        _replace(transformer, layout.embeddings, PassthroughEmbeddings())
        for path in layout.behind_embeddings:
            _replace(transformer, path, nn.Identity())
        if layout.after_first_layer is not None:
            _replace(transformer, layout.after_first_layer, None)
    if not rank.is_last:
        for path in layout.behind_layers:
            _replace(transformer, path, nn.Identity())


def _cut_config(transformer: nn.Module, first: int, count: int) -> None:
    """Reduce the configuration to this stage's layers, because modules look up settings by layer."""
    if not hasattr(transformer, "config"):
        return
    config = copy.deepcopy(transformer.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):  # which layers attend within a window only; looked up by index
        config.layer_types = config.layer_types[first : first + count]
    transformer.config = config


def _replace(transformer: nn.Module, path: str, module: nn.Module | None) -> None:
    parent_path, _, name = path.rpartition(".")
    setattr(transformer.get_submodule(parent_path), name, module)


def split_micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into at most `count` parts of similar token counts. All ranks get the same result."""
    bounds = [0]
    tokens, target = 0, batch.num_tokens / count
    for position, length in enumerate(batch.lengths.tolist(), start=1):
        tokens += length
        if tokens >= target * len(bounds) or position == len(batch):
            bounds.append(position)
    return [batch.part(start, end) for start, end in pairwise(bounds) if end > start]


class PipelineStage:
    """One rank's stage of the pipeline. The host waits only for hidden states that have not arrived."""

    def __init__(self, rank: Rank, dtype: torch.dtype, device: torch.device) -> None:
        self._rank = rank
        self._dtype = dtype
        self._device = device

    def run(
        self,
        shapes: Sequence[tuple[int, ...]],
        compute: Callable[[int, Tensor | None], Any],
    ) -> list[Any]:
        """Return the last stage's results of `compute(number, hidden states)` for each micro-batch.

        Other stages send what `compute` returns to the next stage and return nothing. `shapes` are those of
        the hidden states [n, length, hidden size] of each micro-batch, which every rank knows.
        """
        results: list[Any] = []
        arriving = self._receive(shapes[0])
        leaving: _Transfer | None = None
        for number in range(len(shapes)):
            hidden_states = None if arriving is None else arriving.finish()
            # Post the next receive before computing, so that the previous stage rarely waits for it. Only
            # one: waiting and leaving hidden states take memory, and the plan counts one of each.
            arriving = self._receive(shapes[number + 1]) if number + 1 < len(shapes) else None
            made = compute(number, hidden_states)
            hidden_states = None
            if self._rank.is_last:
                results.append(made)
                continue
            if leaving is not None:
                leaving.finish()
            made = made.contiguous()
            leaving = _Transfer(dist.isend(made, self._rank.number + 1), made)
        if leaving is not None:
            leaving.finish()
        return results

    def _receive(self, shape: tuple[int, ...]) -> "_Transfer | None":
        if self._rank.is_first:
            return None
        hidden_states = torch.empty(shape, dtype=self._dtype, device=self._device)
        return _Transfer(dist.irecv(hidden_states, self._rank.number - 1), hidden_states)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Hidden states being sent to or received from a neighbour.

    Keep the tensor until the transfer has finished.
    """

    request: Any
    hidden_states: Tensor

    def finish(self) -> Tensor:
        self.request.wait()
        return self.hidden_states
