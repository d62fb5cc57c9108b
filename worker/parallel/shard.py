"""One rank's part of a network that several devices share, and how the parts of a batch pass through it.

What goes into the network, and what happens to its last hidden states, is decided by the encoder.

All ranks communicate in the same order. They receive batches in one order (worker.runner.runner_group), and
one thread starts them in that order (worker.runner.runner_process). Only starting a batch, or computing it
where nothing is queued, sends anything to another rank; the thread that prepares the next batch does not. So
all communication of batch 1 precedes all communication of batch 2, whether a rank queues the second batch
after the first or starts it a little later.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vectormill.models.families import Layout
from worker.batching.batch import Batch
from worker.devices.device import CPU, CUDA
from worker.encoder.choice import find_arithmetic
from worker.encoder.encoder import EncoderOrder
from worker.model.torch_encoder import DTYPES
from worker.model.weights import open_adapter
from worker.parallel.agreement import PROCESS_GROUPS, join_process_group
from worker.parallel.filling import fill, hold_rounded
from worker.parallel.offload import OffloadedLayers
from worker.parallel.pipeline import PipelineStage, cut_stage
from worker.placement.footprint import COMPRESSED
from worker.placement.placement import Rank
from worker.placement.strategies import STRATEGIES, TENSOR


def apply_tensor_parallel(transformer: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Split the linear layers of every layer, whose parameters may still be on the meta device.

    If there are more ranks than key heads, ranks whose queries need the same key head each have it whole, as
    consecutive ranks. Whether layers can be split was asked before (worker.placement.obstacles).
    """
    config, ranks = transformer.config, mesh.size()
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    plan = {path: ColwiseParallel() for path in layout.columns}
    plan |= {path: RowwiseParallel() for path in layout.rows}
    of_keys, by_head = {}, None
    if ranks > key_heads:
        of_keys = {path: plan.pop(path) for path in layout.key_columns}
        by_head = init_device_mesh(
            mesh.device_type, (key_heads, ranks // key_heads), mesh_dim_names=("head", "copy")
        )
    for layer in transformer.get_submodule(layout.layers):
        parallelize_module(layer, mesh, plan)
        if by_head is not None:
            parallelize_module(layer, by_head["head"], of_keys)
            for module in layer.modules():  # one key head for all queries of this rank
                if hasattr(module, "num_key_value_groups"):
                    module.num_key_value_groups = config.num_attention_heads // ranks


def apply_fully_sharded(transformer: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Split parameters along their first dimension.

    A layer's are gathered while the one before is computed.
    """
    layers = list(transformer.get_submodule(layout.layers))
    # The embeddings are a separate unit, so that a vocabulary is whole only during its look-up, not during
    # every layer.
    fully_shard(transformer.get_submodule(layout.embeddings), mesh=mesh, reshard_after_forward=True)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(transformer, mesh=mesh, reshard_after_forward=True)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


def divide_batch(batch: Batch, most: int, *, pads: bool) -> list[Batch]:
    """Divide a batch between sequences into at most `most` parts, of which the largest is as small as possible.

    The size of a part is the number of tokens that are computed for it: if `pads`, its number of sequences times the
    longest one, otherwise their sum. All ranks get the same parts.
    """
    lengths = batch.lengths
    low, high = int(lengths.max()), int(batch.num_padded_tokens if pads else lengths.sum())
    while (
        low < high
    ):  # by bisection: a part only grows with more sequences, so parts are filled from the left
        middle = (low + high) // 2
        if len(_fill_parts(lengths, middle, pads=pads)) - 1 <= most:
            high = middle
        else:
            low = middle + 1
    return [batch.part(start, end) for start, end in pairwise(_fill_parts(lengths, low, pads=pads))]


def _fill_parts(lengths: NDArray[np.int64], largest: int, *, pads: bool) -> list[int]:
    """Return the bounds of consecutive parts, each as long as its size is at most `largest`."""
    bounds = [0]
    while (start := bounds[-1]) < len(lengths):
        reached = lengths[start : start + largest // int(lengths[start])] if pads else lengths[start:]
        sizes = (
            np.maximum.accumulate(reached) * np.arange(1, len(reached) + 1) if pads else np.cumsum(reached)
        )
        bounds.append(start + int(np.searchsorted(sizes, largest, side="right")))
    return bounds


class LoadedShard:
    """One rank's part of a network, filled. `num_bytes_read` is the size of its weights in the files."""

    def __init__(
        self,
        order: EncoderOrder,
        rank: Rank,
        network: nn.Module,
        layout: Layout,
        precision: str,
        hidden_size: int,
    ) -> None:
        """Divide and fill the network, whose parameters have no storage yet. Raises ModelError."""
        self._rank = rank
        self._hidden_size = hidden_size
        self.device = open_device(order)
        join_process_group(rank, PROCESS_GROUPS[order.device.kind])
        with open_adapter(network, order.card) as adapter:  # while the network is whole
            cuts = self._divide(network, layout, is_compressed=precision in COMPRESSED)
            offloaded = OffloadedLayers(network.get_submodule(layout.layers), rank.num_offloaded)
            self.num_bytes_read = fill(
                network,
                order.card,
                layout,
                self.device,
                first_layer=rank.first_layer,
                joined=layout.joined if rank.strategy == TENSOR else {},
                cuts=cuts,
                adapter=adapter,
                on_read=order.on_read,
            )
        offloaded.attach(self.device)
        dtype = DTYPES[find_arithmetic(precision, order.device)]
        self._stage = PipelineStage(rank, dtype, self.device)
        # Returns for how long this rank has waited for its neighbours in the batches that are done, as far as
        # that can be told: an all-reduce or a gather is a part of the computation.
        self.take_waited_seconds = self._stage.take_waited_seconds

    @property
    def reads_tokens(self) -> bool:
        """Return True if this rank has the embeddings."""
        return self._rank.is_first or not self._has_stages

    @property
    def has_last_states(self) -> bool:
        """Return True if this rank ends up with the model's last hidden states."""
        return self._rank.is_last or not self._has_stages

    @property
    def answers(self) -> bool:
        """Return True if this rank returns the results of any batch."""
        return self._rank.is_first if self._rank.strategy == TENSOR else self.has_last_states

    @property
    def num_stages(self) -> int:
        """Return how many batches the ranks compute at once."""
        return len(self._rank.stage_layers)

    def choose_part(self, batch: Batch, *, pads: bool) -> tuple[Batch, bool]:
        """Return the part of a batch that this rank computes, and whether it returns its results.

        Communicates with no other rank. `pads` means that a part is padded to its longest sequence.
        """
        rank = self._rank
        if not STRATEGIES[rank.strategy].divides_batches:
            return batch, self.answers
        shares = divide_batch(batch, rank.world_size, pads=pads)
        if rank.number < len(shares):
            return shares[rank.number], True
        return batch.part(0, 1), False  # gathering needs all ranks, also one without any sequence

    def run_part(self, shape: tuple[int, ...], run: Callable[[Tensor | None], Any]) -> Any:
        """Return `run(hidden states of the previous stage)`; None on a stage that is not the last one.

        `shape` is that of the part's token ids; with the hidden size appended it is that of its hidden states.
        """
        if not self._has_stages:
            return run(None)
        return self._stage.run((*shape, self._hidden_size), run)

    @property
    def _has_stages(self) -> bool:
        return STRATEGIES[self._rank.strategy].has_stages

    def _divide(self, network: nn.Module, layout: Layout, *, is_compressed: bool) -> dict[str, Tensor]:
        """Reduce the network to this rank's part.

        Return how parameters were cut, by name, for modules that do not record it themselves.
        """
        if self._has_stages:
            cut_stage(network, layout, self._rank)
            return hold_rounded(network) if is_compressed else {}
        mesh = init_device_mesh(self.device.type, (self._rank.world_size,))
        if self._rank.strategy == TENSOR:
            apply_tensor_parallel(network, layout, mesh)
            return hold_rounded(network) if is_compressed else {}
        if is_compressed:
            hold_rounded(network)
        apply_fully_sharded(network, layout, mesh)
        return {}


def open_device(order: EncoderOrder) -> torch.device:
    """Return the device of this process, after limiting its threads."""
    if order.device.kind == CPU:
        torch.set_num_threads(1 if order.is_reproducible else order.num_threads)
        return torch.device("cpu")
    assert order.device.kind == CUDA
    device = torch.device("cuda:0")  # the environment shows a process only its own GPU
    # Set before there is a mesh, which would otherwise take a launcher's LOCAL_RANK as the number of this
    # GPU.
    torch.cuda.set_device(device)
    return device
