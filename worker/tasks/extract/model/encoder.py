"""RexEncoder: runs RexUniNLU with torch on one device, and sends the cells that spans are made of. Pads."""

import time
from typing import Final

import torch

from vectormill.domain.errors import ModelError
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CPU, CUDA
from worker.encoder.backends import AUTO
from worker.encoder.choice import BF16, FP32, choose_precision
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport, Loading, device_choice
from worker.model.cuda_pass import losing_device
from worker.model.network import count_weight_bytes
from worker.model.torch_encoder import DTYPES
from worker.tasks.extract.model.head import compute_cells
from worker.tasks.extract.model.network import load_network

BACKEND: Final = "torch"


class RexEncoder(DirectEncoder):
    """Padded batches on one device."""

    def __init__(self, order: EncoderOrder) -> None:
        """Raises ModelError for what it cannot do, and for a model that is not what it should be."""
        start = time.perf_counter()
        if order.backend not in (AUTO, BACKEND):
            raise ModelError(f"Extraction runs with {BACKEND} alone, not with {order.backend}; use auto.")
        if order.device.kind == CPU:
            torch.set_num_threads(order.num_threads)
        self._device = torch.device("cuda:0" if order.device.kind == CUDA else order.device.kind)
        precision = choose_extraction_precision(order)
        self._network = load_network(order.card.path, DTYPES[precision.value], self._device)
        seconds = time.perf_counter() - start
        self._report = EncoderReport(
            device=device_choice(order),
            backend=Choice(
                BACKEND, "its attention has positions of its own, which no other backend was shown"
            ),
            precision=precision,
            attention="padded (disentangled, by sequence)",
            num_threads=order.num_threads,
            load_seconds=seconds,
            loadings=(Loading(order.device.name, count_weight_bytes(order.card), seconds),),
            gives_vectors=False,
        )

    def encode(self, batch: Batch) -> Ragged:
        if self._device.type != CUDA:
            return compute_cells(self._network, batch, self._device)
        with losing_device():
            return compute_cells(self._network, batch, self._device)

    def describe(self) -> EncoderReport:
        return self._report


def choose_extraction_precision(order: EncoderOrder) -> Choice:
    """fp32 unless bf16 is asked for. Raises ModelError for others."""
    if order.precision == AUTO:
        return Choice(FP32, "the sign of a number decides whether a span is found")
    chosen = choose_precision(order.precision, order.device)
    if chosen.value not in (FP32, BF16):
        raise ModelError(f"Extraction computes in {FP32} or {BF16}, not in {chosen.value}.")
    return chosen
