"""Keep layers of a model in main memory, and copy each to the GPU before it is computed.

The GPU has room for two of these layers, which they use in turns: while one is computed, the next one arrives. After
the last one the first arrives, for the next batch. Layers that stay on the GPU lie between them, so that copies have
more time. The same idea as accelerate's `cpu_offload`, which copies a layer only when it is due.
"""

import logging
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn

from worker.devices.device import CUDA
from worker.placement.strategies import NUM_SLOTS

logger = logging.getLogger(__name__)

# Where tensors begin in memory that several share; kernels read vectors of 16 bytes, and CUDA aligns to 256.
ALIGNMENT: Final = 256


def choose_offloaded(num_layers: int, num_offloaded: int) -> list[int]:
    """Return the indices of the layers to keep in main memory, spread evenly among all layers."""
    return [
        layer
        for layer in range(num_layers)
        if (layer + 1) * num_offloaded // num_layers > layer * num_offloaded // num_layers
    ]


class OffloadedLayers:
    """Those of a model's layers that are in main memory, which pass through two slots of a device. Not thread-safe.

    Their number has to be even, so that after the last one the first finds its slot free. Make it while the parameters
    have no storage, fill these, and call `attach`.
    """

    def __init__(self, layers: nn.Module, num_offloaded: int) -> None:
        """Choose so many of the layers, possibly none, and give the parameters of each one block of main memory."""
        assert num_offloaded % NUM_SLOTS == 0
        whole = list(layers.children())
        self._layers = [whole[place] for place in choose_offloaded(len(whole), num_offloaded)]
        self._blocks = [torch.empty(_count_bytes(layer), dtype=torch.uint8) for layer in self._layers]
        for layer, block in zip(self._layers, self._blocks, strict=True):
            _hold_in(block, layer)

    def attach(self, device: torch.device) -> None:
        """Let the layers compute on the device, with what has been written into their parameters."""
        if not self._layers:
            return
        if device.type == CUDA:
            self._pin()
        size = max(len(block) for block in self._blocks)
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._stream = torch.cuda.Stream() if device.type == CUDA else None
        # The place of the layer that each slot has or receives, and the event at which it has arrived.
        self._held: list[int | None] = [None] * NUM_SLOTS
        self._arrived: list[torch.cuda.Event | None] = [None] * NUM_SLOTS
        for place, layer in enumerate(self._layers):
            _hold_in(self._slots[place % NUM_SLOTS], layer)
            layer.register_forward_pre_hook(partial(self._await, place))
            layer.register_forward_hook(partial(self._follow, place))
        for place in range(NUM_SLOTS):
            self._send(place)

    def _pin(self) -> None:
        """Lock the blocks in main memory: only then they are copied at full rate and beside a computation."""
        for block in self._blocks:
            # Not pin_memory, which takes the next power of two.
            status = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), len(block), 0))
            if status:
                with suppress(RuntimeError):  # the next launch of a kernel raises the last error once
                    torch.ones(1, device=CUDA)
                logger.warning(
                    "Main memory cannot be locked (CUDA error %d), so that layers arrive slowly.", status
                )
                return

    def _await(self, place: int, *_: object) -> None:
        """Have the device wait for a layer. After a failed pass it may not be on its way yet."""
        slot = place % NUM_SLOTS
        if self._held[slot] != place:
            self._send(place)
        if (arrived := self._arrived[slot]) is not None:
            torch.cuda.current_stream().wait_event(arrived)

    def _follow(self, place: int, *_: object) -> None:
        """Use the slot of a layer that was computed for the one after the next."""
        self._send((place + NUM_SLOTS) % len(self._layers))

    def _send(self, place: int) -> None:
        slot, block = place % NUM_SLOTS, self._blocks[place]
        if self._held[slot] == place:  # there are only two
            return
        self._held[slot] = place
        if self._stream is None:
            self._slots[slot][: len(block)].copy_(block)
            return
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still read the slot
        with torch.cuda.stream(self._stream):
            self._slots[slot][: len(block)].copy_(block, non_blocking=True)
        self._arrived[slot] = self._stream.record_event()


def _count_bytes(layer: nn.Module) -> int:
    return sum(_round_up(parameter.nbytes) for parameter in layer.parameters())


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _hold_in(block: Tensor, layer: nn.Module) -> None:
    """Let the parameters of a layer be parts of a block of memory, one behind the other."""
    found = [
        (module, name) for module in layer.modules() for name, _ in module.named_parameters(recurse=False)
    ]
    sizes = [getattr(module, name).nbytes for module, name in found]
    starts = accumulate((_round_up(size) for size in sizes), initial=0)
    for (module, name), size, start in zip(found, sizes, starts, strict=False):
        old = getattr(module, name)
        part = block[start : start + size].view(old.dtype).view(old.shape)
        setattr(module, name, nn.Parameter(part, requires_grad=False))
