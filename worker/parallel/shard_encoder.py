"""ShardEncoder: one rank's part of a model that several devices share. Pads; knows no chunks and no pipes.

Every rank is given the same batch and answers the vectors it ends up with, perhaps none: put one behind the other in
the order of the ranks, they are the batch's.
"""

import logging
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CPU, CUDA
from worker.encoder.choice import COMPRESSED, choose_precision, find_arithmetic
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport, Loading, device_choice
from worker.encoder.padding import PaddedBatch, pad_batch
from worker.model.cuda_pass import copy_inputs, losing_device
from worker.model.masks import find_attention_mask, tell_masks
from worker.model.network import Dense, find_pad_token_id, list_token_inputs
from worker.model.pooling import pool_hidden_states
from worker.model.torch_encoder import DTYPES
from worker.parallel.fully_sharded import apply_fully_sharded
from worker.parallel.layouts import Layout, find_layout
from worker.parallel.pipeline import PipelineStage, StageClock, cut_stage, split_micro_batches
from worker.parallel.rounded_shards import hold_rounded
from worker.parallel.skeleton import build_skeleton, fill
from worker.parallel.tensor_parallel import apply_tensor_parallel
from worker.placement.rank import Rank
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, STRATEGIES, TENSOR

logger = logging.getLogger(__name__)

PROCESS_GROUPS: Final = {CPU: "gloo", CUDA: "nccl"}


class ShardEncoder(DirectEncoder):
    """A shard of the network, ready when every other rank is."""

    def __init__(self, order: EncoderOrder, rank: Rank) -> None:
        start = time.perf_counter()
        if order.device.kind == CPU:
            torch.set_num_threads(order.num_threads)
        self._card = order.card
        self._rank = rank
        # A strategy that nobody carries out is refused before anything is read.
        self._compute = {
            TENSOR: self._encode_whole,
            FULLY_SHARDED: self._encode_share,
            PIPELINE: self._encode_stage,
        }[rank.strategy]
        self._device = torch.device("cuda:0" if order.device.kind == CUDA else "cpu")
        if order.device.kind == CUDA:
            # Said before there is a mesh, which would take a launcher's LOCAL_RANK for the number of this GPU.
            torch.cuda.set_device(self._device)
        precision = choose_precision(order.precision, order.device)
        self._dtype = DTYPES[find_arithmetic(precision.value, order.device)]
        self._transformer = build_skeleton(order.card, self._dtype)
        tell_masks(self._transformer)
        self._token_inputs = list_token_inputs(self._transformer)
        layout = find_layout(str(self._transformer.config.model_type))
        join_process_group(rank, PROCESS_GROUPS[order.device.kind])
        cuts = self._divide(layout, precision.value)
        self.num_bytes_read = fill(
            self._transformer,
            order.card,
            layout,
            self._device,
            first_layer=rank.first_layer if STRATEGIES[rank.strategy].has_stages else 0,
            joined=layout.joined if rank.strategy == TENSOR else {},
            cuts=cuts,
            on_read=order.on_read,
        )
        self._dense = nn.Sequential(*(Dense(order.card.path / folder) for folder in order.card.dense))
        self._dense.to(self._device).eval()
        self._stage = PipelineStage(rank, self._dtype, self._device)
        seconds = time.perf_counter() - start
        self._report = EncoderReport(
            device=device_choice(order),
            backend=Choice("torch", f"a model is shared by {rank.strategy} with torch only"),
            precision=precision,
            attention=f"padded ({self._transformer.config._attn_implementation})",
            num_threads=order.num_threads,
            load_seconds=seconds,
            loadings=(Loading(order.device.name, self.num_bytes_read, seconds),),
        )

    def encode(self, batch: Batch) -> Ragged:
        # Not inference_mode: what fully_shard gathers into was made outside of it.
        with losing_device() if self._device.type == CUDA else nullcontext(), torch.no_grad():
            return Ragged.from_matrix(self._compute(batch).float().cpu().numpy())

    def describe(self) -> EncoderReport:
        return self._report

    @property
    def clock(self) -> StageClock:
        """How busy the stage of a pipeline was until now; nothing else counts."""
        return self._stage.clock

    def _divide(self, layout: Layout, precision: str) -> dict[str, Tensor]:
        """Leaves of the model what is this rank's; how parameters were cut whose modules do not tell."""
        is_compressed = precision in COMPRESSED
        if STRATEGIES[self._rank.strategy].has_stages:
            cut_stage(self._transformer, layout, self._rank)
            return hold_rounded(self._transformer) if is_compressed else {}
        mesh = init_device_mesh(self._device.type, (self._rank.world_size,))
        if self._rank.strategy == TENSOR:
            apply_tensor_parallel(self._transformer, layout, mesh)
            return hold_rounded(self._transformer) if is_compressed else {}
        if is_compressed:
            hold_rounded(self._transformer)
        apply_fully_sharded(self._transformer, layout, mesh)
        return {}

    def _encode_whole(self, batch: Batch) -> Tensor:
        """Every rank ends up with all hidden states; the first one answers."""
        padded = pad_batch(batch, self._pad_token_id)
        hidden_states = self._transformer(**self._inputs(padded))[0]
        return self._pool(hidden_states, padded) if self._rank.is_first else self._no_vectors()

    def _encode_share(self, batch: Batch) -> Tensor:
        """Every rank encodes sequences of its own. One without any runs along, since gathering takes all ranks."""
        shares = split_micro_batches(batch, self._rank.world_size)
        is_idle = self._rank.number >= len(shares)
        padded = pad_batch(batch.part(0, 1) if is_idle else shares[self._rank.number], self._pad_token_id)
        hidden_states = self._transformer(**self._inputs(padded))[0]
        return self._no_vectors() if is_idle else self._pool(hidden_states, padded)

    def _encode_stage(self, batch: Batch) -> Tensor:
        parts = split_micro_batches(batch, self._rank.micro_batches)
        padded = [pad_batch(part, self._pad_token_id) for part in parts]
        hidden_size = int(self._transformer.config.hidden_size)

        def compute(number: int, hidden_states: Tensor | None) -> Tensor:
            inputs = self._inputs(padded[number])
            if hidden_states is not None:
                del inputs["input_ids"]
                inputs["inputs_embeds"] = hidden_states
            made: Tensor = self._transformer(**inputs)[0]
            return self._pool(made, padded[number]) if self._rank.is_last else made

        vectors = self._stage.run([(*part.input_ids.shape, hidden_size) for part in padded], compute)
        return torch.cat(vectors) if vectors else self._no_vectors()

    def _inputs(self, padded: PaddedBatch) -> dict[str, Tensor]:
        mask = find_attention_mask(padded, self._transformer.config)
        arrays = {name: padded.tokens[name] for name in self._token_inputs if name in padded.tokens}
        if mask is not None:
            arrays["attention_mask"] = mask
        return dict(zip(arrays, copy_inputs(list(arrays.values()), self._device), strict=True))

    def _pool(self, hidden_states: Tensor, padded: PaddedBatch) -> Tensor:
        (pool_mask,) = copy_inputs([padded.pool_mask], self._device)
        vectors: Tensor = self._dense(pool_hidden_states(hidden_states, pool_mask, self._card.pooling))
        return vectors

    def _no_vectors(self) -> Tensor:
        return torch.empty((0, self._card.dimension))

    @property
    def _pad_token_id(self) -> int:
        return find_pad_token_id(self._transformer.config.to_dict())


def join_process_group(rank: Rank, backend: str) -> None:
    """Waits until all ranks are there. A collective that takes longer than the timeout raises on every rank.

    With NCCL it ends the process instead. The executor is faster in both cases, see Engine.

    NCCL is not told the device, and so makes communicators when they are first used: one for two stages that talk.
    Made at once, a single one would carry all that is sent and received, one after another on one stream, and no stage
    could send a micro-batch before it has received all of them. Source: c10d, ProcessGroupNCCL::pointToPoint.
    """
    if dist.is_initialized():  # by another model of this process
        return
    timeout = timedelta(seconds=rank.timeout_seconds)
    store = dist.FileStore(str(rank.meeting_point), rank.world_size)
    store.set_timeout(timeout)  # else 300 s, while others may still be starting
    dist.init_process_group(
        backend, store=store, rank=rank.number, world_size=rank.world_size, timeout=timeout
    )


def load_shard(order: EncoderOrder) -> ShardEncoder:
    """Raises ModelError when the model cannot be divided as its rank says."""
    assert order.rank is not None
    return ShardEncoder(order, order.rank)
