"""Pipeline parallelism: each rank runs consecutive layers, and batches pass through the ranks."""

import copy
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vectormill.models.families import Layout
from worker.devices.device import CUDA
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
    if hasattr(transformer, "config"):  # modules look up settings by layer
        config = copy.deepcopy(transformer.config)
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None):  # which layers attend within a window only
            config.layer_types = config.layer_types[first : first + count]
        transformer.config = config
    if not rank.is_first:
        _replace(transformer, layout.embeddings, PassthroughEmbeddings())
        for path in layout.behind_embeddings:
            _replace(transformer, path, nn.Identity())
        if layout.after_first_layer is not None:
            _replace(transformer, layout.after_first_layer, None)
    if not rank.is_last:
        for path in layout.behind_layers:
            _replace(transformer, path, nn.Identity())


def _replace(transformer: nn.Module, path: str, module: nn.Module | None) -> None:
    parent_path, _, name = path.rpartition(".")
    setattr(transformer.get_submodule(parent_path), name, module)


class PipelineStage:
    """One rank's stage of the pipeline, through which batches pass one after another.

    A stage does not wait until the next one has use for what it sends: it computes the next batch meanwhile, so all
    stages compute at once, each another batch. Besides the hidden states that a stage computes, it holds at most
    those of one batch that waits to be sent and of one that arrives, which is what the plan counts.
    """

    def __init__(self, rank: Rank, dtype: torch.dtype, device: torch.device) -> None:
        self._rank = rank
        self._dtype = dtype
        self._device = device
        # Receives on a GPU. On the stream that computes, a transfer would wait for the batch before.
        self._stream = torch.cuda.Stream() if device.type == CUDA else None
        self._leaving: tuple[Any, Tensor] | None = None  # what is being sent, and its request
        self._waited_seconds = 0.0
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # of a GPU: begin and end

    def run(self, shape: tuple[int, ...], compute: Callable[[Tensor | None], Any]) -> Any:
        """Return `compute(hidden states of the previous stage)` for a batch, if this is the last stage.

        Other stages send what `compute` returns to the next stage and return None. `shape` is that of the hidden
        states [n, length, hidden size], which every rank knows.
        """
        made = compute(None if self._rank.is_first else self._receive(shape))
        if self._rank.is_last:
            return made
        if self._leaving is not None:
            self._wait(self._leaving[0])
        made = made.contiguous()
        self._leaving = dist.isend(made, self._rank.number + 1), made
        return None

    def take_waited_seconds(self) -> float:
        """Return for how long this stage has waited for its neighbours in the batches that are done."""
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self._waited_seconds += begin.elapsed_time(end) / 1000
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds

    def _receive(self, shape: tuple[int, ...]) -> Tensor:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            hidden_states = torch.empty(shape, dtype=self._dtype, device=self._device)
            request = dist.irecv(hidden_states, self._rank.number - 1)
        self._wait(request)
        if self._stream is not None:
            hidden_states.record_stream(torch.cuda.current_stream())
        return hidden_states

    def _wait(self, request: Any) -> None:
        """Have the device wait for a transfer; the host waits only where it computes itself."""
        if self._stream is None:
            begun_at = time.perf_counter()
            request.wait()
            self._waited_seconds += time.perf_counter() - begun_at
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        request.wait()
        end.record()
        self._waits.append((begin, end))
