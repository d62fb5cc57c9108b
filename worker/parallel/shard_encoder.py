"""ShardEncoder: one rank's part of a model that several devices share. Knows no chunks and no pipes.

Every rank is given the same batch and answers the vectors it ends up with, perhaps none: put one behind the other in
the order of the ranks, they are the batch's.

What ranks do together is done in one order on all of them. They are given batches in one order
(worker.runner.runner_group), one thread starts them in that order (worker.runner.stream), and only starting a batch, or
computing it where nothing is queued, sends anything to another rank: the thread that prepares the next one does not. So
all that batch 1 says to other ranks stands before all that batch 2 says, whether a rank queues the second behind the
first or is a little later and has it still to start.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CPU, CUDA
from worker.encoder.choice import COMPRESSED, choose_precision, find_arithmetic
from worker.encoder.encoder import Choice, Encoder, EncoderOrder, EncoderReport, Loading, device_choice
from worker.encoder.forward_pass import Deferred, ForwardPass
from worker.encoder.switches import PACKED_RANKS, QUEUED_RANKS
from worker.model.architectures import read_attention_shape
from worker.model.cuda_pass import Compute, CudaPass, copy_inputs, losing_device
from worker.model.masks import tell_masks
from worker.model.network import Dense, list_token_inputs
from worker.model.packed_attention import (
    EXACT,
    VARLEN,
    exact_kernel,
    register_packed_attention,
    varlen_kernel,
)
from worker.model.packed_network import make_probes
from worker.model.torch_encoder import DTYPES
from worker.parallel.forms.choice import RankSwitches, choose_rank_switches
from worker.parallel.forms.form import Form, Part
from worker.parallel.forms.packed_form import PackedForm
from worker.parallel.forms.padded_form import PaddedForm
from worker.parallel.forms.probe import find_flaw, set_attention
from worker.parallel.fully_sharded import apply_fully_sharded
from worker.parallel.layouts import Layout, find_layout
from worker.parallel.meeting import PROCESS_GROUPS, ask_all, join_process_group
from worker.parallel.pipeline import PipelineStage, StageClock, cut_stage, split_micro_batches
from worker.parallel.rounded_shards import hold_rounded
from worker.parallel.skeleton import build_skeleton, fill
from worker.parallel.tensor_parallel import apply_tensor_parallel
from worker.placement.rank import Rank
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, STRATEGIES, TENSOR

logger = logging.getLogger(__name__)


class ShardEncoder(Encoder):
    """A shard of the network, ready when every other rank is."""

    def __init__(self, order: EncoderOrder, rank: Rank) -> None:
        start = time.perf_counter()
        if order.device.kind == CPU:
            torch.set_num_threads(order.num_threads)
        self._card = order.card
        self._rank = rank
        # A strategy that nobody carries out is refused before anything is read.
        self._choose_parts = {
            TENSOR: self._take_whole,
            FULLY_SHARDED: self._take_share,
            PIPELINE: self._take_micro_batches,
        }[rank.strategy]
        self._device = torch.device("cuda:0" if order.device.kind == CUDA else "cpu")
        if order.device.kind == CUDA:
            # Said before there is a mesh, which would take a launcher's LOCAL_RANK for the number of this GPU.
            torch.cuda.set_device(self._device)
        precision = choose_precision(order.precision, order.device)
        dtype = DTYPES[find_arithmetic(precision.value, order.device)]
        self._transformer = build_skeleton(order.card, dtype)
        tell_masks(self._transformer)
        layout = find_layout(str(self._transformer.config.model_type))
        join_process_group(rank, PROCESS_GROUPS[order.device.kind])
        cuts = self._divide(layout, precision.value)
        self.num_bytes_read = fill(
            self._transformer,
            order.card,
            layout,
            self._device,
            first_layer=rank.first_layer if self._has_stages else 0,
            joined=layout.joined if rank.strategy == TENSOR else {},
            cuts=cuts,
            on_read=order.on_read,
        )
        self._dense = nn.Sequential(*(Dense(order.card.path / folder) for folder in order.card.dense))
        self._dense.to(self._device).eval()
        self._stage = PipelineStage(rank, dtype, self._device)
        self._form, switches = self._load_form(order, precision)
        logger.info("%s attends %s on rank %d", order.card.name, self._form.attention, rank.number)
        # Copies to the device have a stream of their own, so that they do not queue behind the current forward pass.
        self._stream = torch.cuda.Stream() if QUEUED_RANKS in switches.names else None
        seconds = time.perf_counter() - start
        self._report = EncoderReport(
            device=device_choice(order),
            backend=Choice("torch", f"a model is shared by {rank.strategy} with torch only"),
            precision=precision,
            attention=self._form.attention,
            num_threads=order.num_threads,
            load_seconds=seconds,
            loadings=(Loading(order.device.name, self.num_bytes_read, seconds),),
            notes=switches.notes,
            is_packed=PACKED_RANKS in switches.names,
            is_queued=QUEUED_RANKS in switches.names,
            switches=switches.names,
        )

    def prepare(self, batch: Batch) -> ForwardPass:
        """Says nothing to other ranks: it is done while another batch is computed."""
        batches, has_vectors = self._choose_parts(batch)
        parts = [self._form.lay_out(each) for each in batches]
        arrays = [array for part in parts for array in part.arrays.values()]
        compute = partial(self._compute, parts, has_vectors)
        if self._stream is not None:
            return CudaPass(arrays, compute, self._device, self._stream, torch.no_grad)
        return Deferred(partial(self._compute_here, arrays, compute))

    def describe(self) -> EncoderReport:
        return self._report

    @property
    def clock(self) -> StageClock:
        """How busy the stage of a pipeline was until now; nothing else counts."""
        return self._stage.clock

    @property
    def _has_stages(self) -> bool:
        return STRATEGIES[self._rank.strategy].has_stages

    def _divide(self, layout: Layout, precision: str) -> dict[str, Tensor]:
        """Leaves of the model what is this rank's; how parameters were cut whose modules do not tell."""
        is_compressed = precision in COMPRESSED
        if self._has_stages:
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

    def _load_form(self, order: EncoderOrder, precision: Choice) -> tuple[Form, RankSwitches]:
        """Packed where all ranks can and agree with padding; the same on every rank, which all compute the probes."""
        transformer, rank = self._transformer, self._rank
        switches = choose_rank_switches(order, rank, transformer.config, precision)
        has_tokens = rank.is_first or not self._has_stages
        token_inputs = list_token_inputs(transformer) if has_tokens else ()
        padded = PaddedForm(transformer, token_inputs, self._card.pooling)
        if PACKED_RANKS not in switches.names:
            return padded, switches
        name, kernel = (VARLEN, varlen_kernel) if order.device.kind == CUDA else (EXACT, exact_kernel)
        shape = read_attention_shape(transformer.config)
        packed = PackedForm(transformer, token_inputs, self._card.pooling, shape, name)
        flaw = find_flaw(
            transformer,
            padded,
            packed,
            kernel,
            make_probes(transformer.config, self._card.max_tokens),
            self._compute_probe,
            partial(ask_all, rank),
            has_last_states=rank.is_last or not self._has_stages,
        )
        if flaw:
            return padded, switches.refuse(PACKED_RANKS, flaw)
        register_packed_attention()
        set_attention(transformer, name)
        return packed, switches

    def _take_whole(self, batch: Batch) -> tuple[list[Batch], bool]:
        """Every rank ends up with all hidden states; the first one answers."""
        return [batch], self._rank.is_first

    def _take_share(self, batch: Batch) -> tuple[list[Batch], bool]:
        """Every rank encodes sequences of its own. One without any runs along, since gathering takes all ranks."""
        shares = split_micro_batches(batch, self._rank.world_size)
        is_idle = self._rank.number >= len(shares)
        return [batch.part(0, 1) if is_idle else shares[self._rank.number]], not is_idle

    def _take_micro_batches(self, batch: Batch) -> tuple[list[Batch], bool]:
        """Cut between sequences, so that each has bounds of its own; the last stage answers."""
        return split_micro_batches(batch, self._rank.micro_batches), self._rank.is_last

    def _compute(self, parts: Sequence[Part], has_vectors: bool, *joined: Tensor) -> Tensor:
        """Vectors [n, dim] of the parts, whose arrays are `joined`; none where others answer them."""
        names = [list(part.arrays) for part in parts]
        left = iter(joined)
        tensors = [{name: next(left) for name in each} for each in names]

        def run(number: int, received: Tensor | None) -> Tensor:
            states = self._form.run(parts[number], tensors[number], received)
            return self._dense(self._form.pool(states, tensors[number])) if has_vectors else states

        vectors = self._run_parts(parts, run)
        return torch.cat(vectors) if has_vectors else torch.empty((0, self._card.dimension))

    def _compute_probe(self, form: Form, probe: Batch) -> Tensor:
        """[tokens, hidden size], of all tokens on every rank that has them."""
        part = form.lay_out(probe)
        tensors = dict(zip(part.arrays, copy_inputs(list(part.arrays.values()), self._device), strict=True))
        made: list[Tensor] = []

        def run(number: int, received: Tensor | None) -> Tensor:
            made.append(form.run(part, tensors, received))
            return made[0]

        with torch.no_grad():
            self._run_parts([part], run)
        return form.of_tokens(made[0], tensors)

    def _run_parts(self, parts: Sequence[Part], run: Callable[[int, Tensor | None], Tensor]) -> list[Tensor]:
        """What `run` makes of each part; of stages, the last one's."""
        if not self._has_stages:
            return [run(number, None) for number in range(len(parts))]
        hidden_size = int(self._transformer.config.hidden_size)
        return self._stage.run([(*part.shape, hidden_size) for part in parts], run)

    def _compute_here(self, arrays: Sequence[NDArray[np.int64]], compute: Compute) -> Ragged:
        """Where nothing is queued: all is done when the results are asked for."""
        # Not inference_mode: what fully_shard gathers into was made outside of it.
        with losing_device() if self._device.type == CUDA else nullcontext(), torch.no_grad():
            return Ragged.from_matrix(compute(*copy_inputs(arrays, self._device)).float().cpu().numpy())


def load_shard(order: EncoderOrder) -> ShardEncoder:
    """Raises ModelError when the model cannot be divided as its rank says."""
    assert order.rank is not None
    return ShardEncoder(order, order.rank)
