"""Run the networks of extractors with torch on one device, in padded batches, among them RexUniNLU.

On a CPU several batches are computed in parallel, each by some of the cores (docs/decisions/0015).
"""

import time
from abc import abstractmethod
from contextlib import nullcontext
from typing import Any, Final

import torch

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CPU, CUDA
from worker.encoder.choice import PACKED, choose_extraction_precision
from worker.encoder.encoder import (
    AUTO,
    Choice,
    DirectEncoder,
    EncoderOrder,
    EncoderReport,
    Loading,
    device_choice,
)
from worker.encoder.switches import SWITCHES, SwitchChoice, parse_switches
from worker.model.cuda_pass import losing_device
from worker.model.network import count_weight_bytes
from worker.model.torch_encoder import DTYPES
from worker.openvino.streams import choose_streams
from worker.tasks.extract.model.config import MODEL_TYPE
from worker.tasks.extract.model.head import compute_cells
from worker.tasks.extract.model.network import RexNetwork, load_network

BACKEND: Final = "torch"
ATTENTION: Final = "padded (disentangled, by sequence)"


class ExtractionEncoder(DirectEncoder):
    """An encoder of padded batches on one device; each stream computes one batch at a time.

    An author's model has a class of its own, with a network and what it computes.
    """

    reason: str  # for torch
    attention: str
    obstacle: str  # to packed attention

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
        self._network = self.load(order.card, DTYPES[precision.value])
        seconds = time.perf_counter() - start
        self._report = EncoderReport(
            device=device_choice(order),
            backend=Choice(BACKEND, self.reason),
            precision=precision,
            attention=self.attention,
            num_threads=order.num_threads,
            num_streams=num_streams,
            load_seconds=seconds,
            loadings=(Loading(order.device.name, count_weight_bytes(order.card), seconds),),
            gives_vectors=False,
        )

    @abstractmethod
    def load(self, card: ModelCard, dtype: torch.dtype) -> Any:
        """Load the network on the device. Raises ModelError."""

    @abstractmethod
    def compute(self, network: Any, batch: Batch) -> Ragged:
        """Run one padded forward pass and return a row of cells for each sequence."""

    def encode(self, batch: Batch) -> Ragged:
        with losing_device() if self.device.type == CUDA else nullcontext():
            return self.compute(self._network, batch)

    def describe(self) -> EncoderReport:
        return self._report


class RexEncoder(ExtractionEncoder):
    """An encoder of padded batches of a RexUniNLU."""

    reason = "its attention to positions was not verified with other backends"
    attention = ATTENTION
    obstacle = find_family(MODEL_TYPE).packing_obstacle

    def load(self, card: ModelCard, dtype: torch.dtype) -> RexNetwork:
        return load_network(card.path, dtype, self.device)

    def compute(self, network: RexNetwork, batch: Batch) -> Ragged:
        return compute_cells(network, batch, self.device)


def refuse_unsupported(order: EncoderOrder, obstacle: str) -> None:
    """Raise ModelError if a backend, attention or switch was requested by name and does not exist here."""
    if order.backend not in (AUTO, BACKEND):
        raise ModelError(f"Extraction supports only {BACKEND}, not {order.backend}; use auto.")
    if order.attention == PACKED:
        raise ModelError(f"Packed attention cannot be used because {obstacle}; use padded or auto.")
    for name in parse_switches(order.switches) or ():
        if SWITCHES[name].is_of_ranks == (order.rank is not None):
            SwitchChoice(name, True, "requested", True).refuse("extraction networks have no switches")
