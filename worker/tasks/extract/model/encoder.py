"""Run the networks of extractors with torch on one device, in padded batches, among them RexUniNLU.

On a CPU several batches are computed in parallel, each by some of the cores (docs/decisions/0015). On CUDA the next
batch is queued behind the current one: as many cells are copied back as there was room for, since nobody knows
their number yet, and a batch with more is computed again.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.backends import SHARING
from worker.devices.device import CPU, CUDA
from worker.encoder.choice import PACKED, choose_extraction_precision
from worker.encoder.encoder import AUTO, Choice, Deferred, Encoder, EncoderOrder, ForwardPass
from worker.encoder.switches import SwitchChoice, parse_switches
from worker.model.cuda_pass import Compute, CudaPass, copy_inputs
from worker.model.network import count_weight_bytes
from worker.model.torch_encoder import DTYPES
from worker.openvino.streams import choose_streams
from worker.placement.footprint import find_bias_bytes
from worker.tasks.extract.model.config import MODEL_TYPE
from worker.tasks.extract.model.head import count_cells, gather_cells, name_inputs, pad_arrays, read_rows
from worker.tasks.extract.model.network import RexNetwork, load_network
from worker.tasks.extract.records import CELL_WIDTH

ATTENTION: Final = "padded (disentangled, by sequence)"
# The cells that a queued batch has room for, a token. An entity takes a few cells, and one token in ten begins one.
CELLS_A_TOKEN: Final = 4


class ExtractionEncoder(Encoder):
    """An encoder of padded batches on one device; each stream computes one batch at a time.

    An author's model has a class of its own, with a network and what it computes.
    """

    reason: str  # for torch
    attention: str
    obstacle: str  # to packed attention
    never_waits: bool  # no pass waits for the device, so that the next may be queued

    def __init__(self, order: EncoderOrder) -> None:
        """Load the network. Raises ModelError for a model or an option that is not supported."""
        start = time.perf_counter()
        refuse_unsupported(order, self.obstacle)
        precision = choose_extraction_precision(order.precision, order.device)
        num_streams = 1
        if order.device.kind == CPU:
            num_streams = choose_streams(order, precision.value)
            # Each thread that computes a batch uses this many threads, whichever thread has set it.
            torch.set_num_threads(max(1, order.num_threads // num_streams))
        self.device = torch.device("cuda:0" if order.device.kind == CUDA else order.device.kind)
        # By default cuDNN rounds the numbers of fp32 to TF32, in convolutions and in an LSTM.
        torch.backends.cudnn.allow_tf32 = False
        self._network = self.load(order, DTYPES[precision.value])
        self._stream = torch.cuda.Stream() if order.device.kind == CUDA else None
        self.note_loading(
            order,
            start,
            count_weight_bytes(order.card),
            backend=Choice(SHARING.name, self.reason),
            precision=precision,
            attention=self.attention,
            num_streams=num_streams,
            is_queued=self._stream is not None and self.never_waits,
            gives_vectors=False,
        )

    @abstractmethod
    def load(self, order: EncoderOrder, dtype: torch.dtype) -> Any:
        """Load the network on the device. Raises ModelError."""

    @abstractmethod
    def lay_out(self, network: Any, batch: Batch) -> Mapping[str, NDArray[np.int64]]:
        """Return all that the device needs of a batch, by name."""

    @abstractmethod
    def compute(self, network: Any, tensors: Mapping[str, Tensor], batch: Batch, room: int | None) -> Tensor:
        """Run one padded forward pass and return its cells, as `join_cells` does.

        `tensors` are those of `lay_out` on the device; of `batch`, only what the host needs is read.
        """

    def prepare(self, batch: Batch) -> ForwardPass:
        return self._prepare(batch, CELLS_A_TOKEN * batch.num_padded_tokens)

    def _prepare(self, batch: Batch, room: int) -> ForwardPass:
        arrays = self.lay_out(self._network, batch)

        def compute(num_cells: int | None, *tensors: Tensor) -> Tensor:
            return self.compute(self._network, dict(zip(arrays, tensors, strict=True)), batch, num_cells)

        inputs = list(arrays.values())
        if self._stream is None:
            return Deferred(partial(_compute_here, partial(compute, None), inputs, self.device, len(batch)))
        return CudaPass(
            inputs, partial(compute, room), self.device, self._stream, lay_out=partial(self._read, batch)
        )

    def _read(self, batch: Batch, numbers: NDArray[Any]) -> Ragged:
        """Return the rows of a queued batch. If they had too little room, compute it again."""
        num_cells = int(count_cells(numbers, len(batch)).sum())
        if 2 * len(batch) + CELL_WIDTH * num_cells <= len(numbers):
            return read_rows(numbers, len(batch))
        again = self._prepare(batch, num_cells)
        again.start()
        return again.results()


class RexEncoder(ExtractionEncoder):
    """An encoder of padded batches of a RexUniNLU."""

    reason = "its attention to positions was not verified with other backends"
    attention = ATTENTION
    obstacle = find_family(MODEL_TYPE).packing_obstacle

    never_waits = True

    def load(self, order: EncoderOrder, dtype: torch.dtype) -> RexNetwork:
        device = order.device
        return load_network(
            order.card.path, dtype, self.device, find_bias_bytes(device.kind, device.memory_bytes)
        )

    def lay_out(self, network: RexNetwork, batch: Batch) -> Mapping[str, NDArray[np.int64]]:
        return pad_arrays(batch)

    def compute(
        self, network: RexNetwork, tensors: Mapping[str, Tensor], batch: Batch, room: int | None
    ) -> Tensor:
        inputs = name_inputs(tensors)
        logits = network(**inputs.tokens, is_token=inputs.is_token)
        return gather_cells(logits, inputs, room)


def _compute_here(
    compute: Compute, inputs: list[NDArray[np.int64]], device: torch.device, num_sequences: int
) -> Ragged:
    with torch.inference_mode():
        return read_rows(compute(*copy_inputs(inputs, device)).cpu().numpy(), num_sequences)


def refuse_unsupported(order: EncoderOrder, obstacle: str) -> None:
    """Raise ModelError if a backend, attention or switch was requested by name and does not exist here."""
    if order.backend not in (AUTO, SHARING.name):
        raise ModelError(f"Extraction supports only {SHARING.name}, not {order.backend}; use auto.")
    if order.attention == PACKED:
        raise ModelError(f"Packed attention cannot be used because {obstacle}; use padded or auto.")
    for name in parse_switches(order.switches) or ():
        SwitchChoice(name, True, "requested", True).refuse("extraction networks have no switches")
