"""TorchEncoder: runs the network with torch on a CPU, on CUDA or on Apple's GPU. Pads; knows no chunks."""

import time
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.batching.token_batch import TokenBatch
from worker.devices.device import CPU, CUDA
from worker.model.choice import BF16, FP16, FP32
from worker.model.encoder import Choice, EncoderOrder, EncoderReport, device_choice
from worker.model.network import EncoderNetwork
from worker.model.padding import pad_batch

DTYPES: Final = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}


class TorchEncoder:
    """A network on one torch device, padded batches, attention by SDPA wherever the architecture has it."""

    def __init__(
        self, order: EncoderOrder, backend: Choice, precision: Choice, notes: tuple[str, ...] = ()
    ) -> None:
        start = time.perf_counter()
        if order.device.kind == CPU:
            torch.set_num_threads(order.num_threads)
        # The environment shows a process only its own GPU, which is therefore always the first.
        self._device = torch.device("cuda:0" if order.device.kind == CUDA else order.device.kind)
        self._network = EncoderNetwork(order.card, DTYPES[precision.value]).to(self._device)
        self._report = EncoderReport(
            device=device_choice(order),
            backend=backend,
            precision=precision,
            attention=self._network.attention,
            num_threads=order.num_threads,
            load_seconds=time.perf_counter() - start,
            notes=notes,
        )

    def encode(self, batch: TokenBatch) -> NDArray[np.float32]:
        padded = pad_batch(batch, self._network.pad_token_id)
        with torch.inference_mode():
            input_ids = self._to_device(padded.input_ids)
            attention_mask = self._to_device(padded.attention_mask)
            shares_mask = padded.pool_mask is padded.attention_mask
            pool_mask = attention_mask if shares_mask else self._to_device(padded.pool_mask)
            vectors: Tensor = self._network(input_ids, attention_mask, pool_mask)
            result: NDArray[np.float32] = vectors.float().cpu().numpy()
        return result

    def describe(self) -> EncoderReport:
        return self._report

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        """Through pinned memory, so that the copy to a GPU does not stop the thread that queues the next kernel."""
        tensor = torch.from_numpy(array)
        if self._device.type == CUDA:
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)
