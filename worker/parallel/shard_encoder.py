"""Run one rank's part of a model that several devices share and that gives vectors or scores.

Every rank receives the same batch and returns the vectors that it ends up with, possibly none: concatenated
in the order of the ranks, they are the batch's vectors.
"""

import importlib
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vectormill.models.families import find_layout
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CUDA
from worker.encoder.choice import choose_precision, find_arithmetic, read_attention_shape
from worker.encoder.encoder import Choice, Deferred, Encoder, EncoderOrder, ForwardPass
from worker.encoder.switches import PACKED_RANKS, QUEUED_RANKS
from worker.model.classifiers import check_published
from worker.model.cuda_pass import Compute, CudaPass, copy_inputs, losing_device
from worker.model.forms import Form, PackedForm, PaddedForm, Part
from worker.model.network import check_tokenizer, list_token_inputs, load_dense
from worker.model.packed import (
    EXACT,
    VARLEN,
    exact_kernel,
    make_probes,
    register_packed_attention,
    varlen_kernel,
)
from worker.model.torch_encoder import DTYPES
from worker.parallel.filling import build_skeleton
from worker.parallel.rank_switches import RankSwitches, choose_rank_switches, find_flaw, set_attention
from worker.parallel.rendezvous import ask_all
from worker.parallel.shard import LoadedShard
from worker.placement.placement import Rank

logger = logging.getLogger(__name__)

# The encoder of extractors, as in worker.encoder.backends.
EXTRACTOR: Final = "worker.tasks.extract.model.shard_encoder:RexShardEncoder"


class ShardEncoder(Encoder):
    """The encoder of one rank. The constructor returns when all ranks are ready."""

    def __init__(self, order: EncoderOrder, rank: Rank) -> None:
        start = time.perf_counter()
        self._card = order.card
        self._rank = rank
        precision = choose_precision(order.precision, order.device, order.card.model_type)
        if rank.is_first:
            check_tokenizer(order.card)
        check_published(order.card)
        self._transformer = build_skeleton(order.card, DTYPES[find_arithmetic(precision.value, order.device)])
        config = self._transformer.config
        self._shard = LoadedShard(
            order,
            rank,
            self._transformer,
            find_layout(str(config.model_type)),
            precision.value,
            int(config.hidden_size),
        )
        self._device = self._shard.device
        self._dense: nn.Module = load_dense(order.card) if self._shard.answers else nn.Identity()
        self._dense.to(self._device).eval()
        self._form, switches = self._load_form(order, precision)
        logger.info("%s uses %s attention on rank %d", order.card.name, self._form.attention, rank.number)
        # Copies to the device use a separate stream, so that they do not wait for the current forward
        # pass.
        self._stream = torch.cuda.Stream() if QUEUED_RANKS in switches.names else None
        self.note_loading(
            order,
            start,
            self._shard.num_bytes_read,
            backend=Choice("torch", f"only torch supports the strategy {rank.strategy}"),
            precision=precision,
            attention=self._form.attention,
            notes=switches.notes,
            is_packed=PACKED_RANKS in switches.names,
            is_queued=QUEUED_RANKS in switches.names,
            switches=switches.names,
        )

    def prepare(self, batch: Batch) -> ForwardPass:
        """Prepare a batch while another is computed, without communicating with other ranks."""
        batches, has_vectors = self._shard.choose_parts(batch)
        parts = [self._form.lay_out(each) for each in batches]
        arrays = [array for part in parts for array in part.arrays.values()]
        compute = partial(self._compute, parts, has_vectors)
        if self._stream is not None:
            return CudaPass(arrays, compute, self._device, self._stream, torch.no_grad)
        return Deferred(partial(self._compute_here, arrays, compute))

    def _load_form(self, order: EncoderOrder, precision: Choice) -> tuple[Form, RankSwitches]:
        """Return the packed form if all ranks can run it and it agrees with padding, else the padded form."""
        transformer, rank = self._transformer, self._rank
        switches = choose_rank_switches(order, rank, transformer.config, precision)
        token_inputs = list_token_inputs(transformer) if self._shard.reads_tokens else ()
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
            has_last_states=self._shard.has_last_states,
        )
        if flaw:
            return padded, switches.refuse(PACKED_RANKS, flaw)
        register_packed_attention()
        set_attention(transformer, name)
        return packed, switches

    def _compute(self, parts: Sequence[Part], has_vectors: bool, *joined: Tensor) -> Tensor:
        """Return vectors [n, dim] of the parts with arrays `joined`; none if other ranks return them."""
        names = [list(part.arrays) for part in parts]
        left = iter(joined)
        tensors = [{name: next(left) for name in each} for each in names]

        def run(number: int, received: Tensor | None) -> Tensor:
            states = self._form.run(parts[number], tensors[number], received)
            return self._dense(self._form.pool(states, tensors[number])) if has_vectors else states

        vectors = self._shard.run_parts([part.shape for part in parts], run)
        return torch.cat(vectors).float() if has_vectors else torch.empty((0, self._card.dimension))

    def _compute_probe(self, form: Form, probe: Batch) -> Tensor:
        """Return the hidden states [tokens, hidden size] of all tokens, on each rank that holds them."""
        part = form.lay_out(probe)
        tensors = dict(zip(part.arrays, copy_inputs(list(part.arrays.values()), self._device), strict=True))
        made: list[Tensor] = []

        def run(number: int, received: Tensor | None) -> Tensor:
            made.append(form.run(part, tensors, received))
            return made[0]

        with torch.no_grad():
            self._shard.run_parts([part.shape], run)
        return form.of_tokens(made[0], tensors)

    def _compute_here(self, arrays: Sequence[NDArray[np.int64]], compute: Compute) -> Ragged:
        """Compute when the results are requested, on a device without a queue."""
        # Not inference_mode: the buffers that fully_shard gathers into were made outside of it.
        with losing_device() if self._device.type == CUDA else nullcontext(), torch.no_grad():
            return Ragged.from_matrix(compute(*copy_inputs(arrays, self._device)).cpu().numpy())


def load_shard(order: EncoderOrder) -> Encoder:
    """Load this rank's part. Raises ModelError if the model cannot be divided in this way."""
    assert order.rank is not None
    if order.card.is_extractor:
        module, _, name = EXTRACTOR.partition(":")
        encoder: Encoder = getattr(importlib.import_module(module), name)(order, order.rank)
        return encoder
    return ShardEncoder(order, order.rank)
