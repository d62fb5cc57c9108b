"""TorchEncoder: runs the network with torch on a CPU, on CUDA or on Apple's GPU, packed or padded; knows no chunks."""

import logging
import time
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vectormill.domain.errors import ModelError
from worker.batching.token_batch import TokenBatch
from worker.devices.device import CPU, CUDA
from worker.model.architectures import PACKED, PADDED, choose_attention, read_attention_shape
from worker.model.choice import AUTO, BF16, FP16, FP32
from worker.model.encoder import Choice, EncoderOrder, EncoderReport, device_choice
from worker.model.network import EncoderNetwork
from worker.model.packed_attention import EXACT, VARLEN
from worker.model.packed_network import PackedNetwork, PackingFailed, pack_network
from worker.model.packing import pack_batch
from worker.model.padding import pad_batch

logger = logging.getLogger(__name__)

DTYPES: Final = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}


class TorchEncoder:
    """A network on one torch device: packed where that is exact and asked for or faster, else padded."""

    def __init__(
        self, order: EncoderOrder, backend: Choice, precision: Choice, notes: tuple[str, ...] = ()
    ) -> None:
        start = time.perf_counter()
        if order.device.kind == CPU:
            torch.set_num_threads(order.num_threads)
        # The environment shows a process only its own GPU, which is therefore always the first.
        self._device = torch.device("cuda:0" if order.device.kind == CUDA else order.device.kind)
        self._network = EncoderNetwork(order.card, DTYPES[precision.value]).to(self._device)
        self._shape = read_attention_shape(self._network.transformer.config)
        attention, self._packed = self._load_attention(order, precision)
        logger.info("%s attends %s: %s", order.card.name, attention.value, attention.reason)
        if order.device.kind == CUDA and self._packed is None and order.attention == AUTO:
            notes = (*notes, f"Batches are padded, because {attention.reason}.")
        self._report = EncoderReport(
            device=device_choice(order),
            backend=backend,
            precision=precision,
            attention=f"{attention.value} ({self._network.attention})",
            num_threads=order.num_threads,
            load_seconds=time.perf_counter() - start,
            notes=notes,
            is_packed=self._packed is not None,
        )

    def encode(self, batch: TokenBatch) -> NDArray[np.float32]:
        with torch.inference_mode():
            vectors = self._encode_padded(batch) if self._packed is None else self._encode_packed(batch)
            result: NDArray[np.float32] = vectors.float().cpu().numpy()
        return result

    def describe(self) -> EncoderReport:
        return self._report

    def _load_attention(self, order: EncoderOrder, precision: Choice) -> tuple[Choice, PackedNetwork | None]:
        """The packed network, compared with padding. Raises ModelError when it was asked for in vain."""
        attention = choose_attention(order.attention, self._shape, order.device, precision.value)
        if attention.value == PADDED:
            return attention, None
        kernel = VARLEN if order.device.kind == CUDA else EXACT
        try:
            return attention, pack_network(
                self._network, kernel, self._shape, order.card.max_tokens, self._device
            )
        except PackingFailed as error:
            if order.attention == PACKED:
                raise ModelError(
                    f"Packed attention cannot be used, because {error}; use padded or auto."
                ) from error
            return Choice(PADDED, str(error)), None

    def _encode_padded(self, batch: TokenBatch) -> Tensor:
        padded = pad_batch(batch, self._network.pad_token_id)
        input_ids = self._to_device(padded.input_ids)
        attention_mask = self._to_device(padded.attention_mask)
        shares_mask = padded.pool_mask is padded.attention_mask
        pool_mask = attention_mask if shares_mask else self._to_device(padded.pool_mask)
        vectors: Tensor = self._network(input_ids, attention_mask, pool_mask)
        return vectors

    def _encode_packed(self, batch: TokenBatch) -> Tensor:
        assert self._packed is not None
        packed = pack_batch(batch, self._shape)
        vectors: Tensor = self._packed(
            self._to_device(packed.input_ids),
            self._to_device(packed.position_ids),
            self._to_device(packed.cu_seqlens).int(),
            self._to_device(packed.prompt_lengths) if packed.prompt_lengths.any() else None,
            packed.max_seqlen,
        )
        return vectors

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        """Through pinned memory, so that the copy to a GPU does not stop the thread that queues the next kernel."""
        tensor = torch.from_numpy(array)
        if self._device.type == CUDA:
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)
