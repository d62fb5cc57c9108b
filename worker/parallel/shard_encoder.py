"""Run one rank's part of a model that several devices share and that gives vectors or scores.

Every rank receives the same batch and returns the vectors that it ends up with, possibly none: concatenated
in the order of the ranks, they are the batch's vectors.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family, find_layout
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.backends import SHARING
from worker.devices.device import CUDA
from worker.encoder.choice import (
    PACKED,
    PADDED,
    choose_attention,
    choose_precision,
    find_arithmetic,
    read_attention_shape,
)
from worker.encoder.encoder import AUTO, Choice, Deferred, Encoder, EncoderOrder, ForwardPass
from worker.encoder.outputs import WantedOutputs
from worker.encoder.switches import SwitchChoice, parse_switches
from worker.model.cuda_pass import Compute, CudaPass, LayOut, copy_inputs
from worker.model.forms import Form, PackedForm, PaddedForm, Part, compute_outputs, lay_out_outputs
from worker.model.heads import check_published
from worker.model.network import (
    check_tokenizer,
    list_token_inputs,
    load_dense,
    load_output_heads,
    weighs_words,
)
from worker.model.packed import (
    EXACT,
    FLASH,
    exact_kernel,
    flash_kernel,
    make_probes,
    register_packed_attention,
)
from worker.model.torch_encoder import DTYPES, find_unattended
from worker.parallel.agreement import ask_all, find_flaw, set_attention
from worker.parallel.filling import build_skeleton, load_word_head
from worker.parallel.shard import LoadedShard
from worker.placement.placement import Rank

logger = logging.getLogger(__name__)


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
        dtype = DTYPES[find_arithmetic(precision.value, order.device)]
        self._transformer = build_skeleton(order.card, dtype)
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
        self._heads = nn.ModuleDict()
        if self._shard.answers:
            words = load_word_head(order.card, dtype) if weighs_words(order.card) else nn.Identity()
            self._heads = load_output_heads(order.card, words, dtype).to(self._device).eval()
        self._form, attention = self._load_form(order, precision)
        logger.info("%s uses %s attention on rank %d", order.card.name, self._form.attention, rank.number)
        notes = [
            SwitchChoice(name, False, "several devices share this model", True).note
            for name in parse_switches(order.switches) or ()
        ]
        if order.device.kind == CUDA and attention.value == PADDED and order.attention == AUTO:
            notes.append(f"Batches are padded because {attention.reason}.")
        # Copies to the device use a separate stream, so that they do not wait for the current forward
        # pass.
        self._stream = torch.cuda.Stream() if order.device.kind == CUDA else None
        self.note_loading(
            order,
            start,
            self._shard.num_bytes_read,
            backend=Choice(SHARING.name, f"only {SHARING.name} supports the strategy {rank.strategy}"),
            precision=precision,
            attention=self._form.attention,
            notes=tuple(notes),
            is_packed=attention.value == PACKED,
            is_queued=self._stream is not None and find_family(str(config.model_type)).never_waits,
            num_stages=self._shard.num_stages,
            pools_passages=True,
        )

    def prepare(self, batch: Batch) -> ForwardPass:
        """Prepare a batch while another is computed, without communicating with other ranks."""
        own, has_results = self._shard.choose_part(batch, pads=not self._report.is_packed)
        part, wanted = lay_out_outputs(self._form, own, self._card)
        arrays = list(part.arrays.values())
        compute = partial(self._compute, part, wanted, has_results)
        lay_out: LayOut = Ragged.from_matrix
        if wanted is not None:
            # A rank whose results others return has no rows of bytes.
            nothing = Ragged.from_rows([], np.uint8)
            lay_out = partial(wanted.lay_out, self._card) if has_results else lambda _: nothing
        if self._stream is not None:
            return CudaPass(arrays, compute, self._device, self._stream, torch.no_grad, lay_out)
        return Deferred(partial(self._compute_here, arrays, compute, lay_out))

    def _load_form(self, order: EncoderOrder, precision: Choice) -> tuple[Form, Choice]:
        """Return the packed form if all ranks can run it and it agrees with padding, else the padded form.

        Raises ModelError if packing was requested and is impossible.
        """
        transformer, rank = self._transformer, self._rank
        shape = replace(
            read_attention_shape(transformer.config), has_unattended=find_unattended(order.card) is not None
        )
        attention = choose_attention(order.attention, shape, order.device, precision.value)
        token_inputs = list_token_inputs(transformer) if self._shard.reads_tokens else ()
        padded = PaddedForm(transformer, token_inputs, self._card.pooling, find_unattended(self._card))
        if objection := ask_all(rank, attention.reason if attention.value == PADDED else ""):
            return padded, Choice(PADDED, objection)
        name, kernel = (FLASH, flash_kernel) if order.device.kind == CUDA else (EXACT, exact_kernel)
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
        if flaw and order.attention == PACKED:
            raise ModelError(f"Packed attention cannot be used because {flaw}; use padded or auto.")
        if flaw:
            return padded, Choice(PADDED, flaw)
        register_packed_attention()
        set_attention(transformer, name)
        return packed, attention

    def take_waited_seconds(self) -> float:
        return self._shard.take_waited_seconds()

    def _compute(
        self, part: Part, wanted: WantedOutputs | None, has_results: bool, *arrays: Tensor
    ) -> Tensor:
        """Return the results of the part with these arrays; none if other ranks return them."""
        tensors = dict(zip(part.arrays, arrays, strict=True))

        def run(received: Tensor | None) -> Tensor:
            states = self._form.run(part, tensors, received)
            if not has_results:
                return states
            return compute_outputs(self._form, self._dense, self._heads, wanted, states, tensors)

        results: Tensor = self._shard.run_part(part.shape, run)
        return results if has_results else torch.empty((0, self._card.dimension))

    def _compute_probe(self, form: Form, probe: Batch) -> Tensor:
        """Return the hidden states [tokens, hidden size] of all tokens, on each rank that holds them."""
        part = form.lay_out(probe)
        tensors = dict(zip(part.arrays, copy_inputs(list(part.arrays.values()), self._device), strict=True))
        made: list[Tensor] = []

        def run(received: Tensor | None) -> Tensor:
            made.append(form.run(part, tensors, received))
            return made[0]

        with torch.no_grad():
            self._shard.run_part(part.shape, run)
        return form.of_tokens(made[0], tensors)

    def _compute_here(
        self, arrays: Sequence[NDArray[np.int64]], compute: Compute, lay_out: LayOut = Ragged.from_matrix
    ) -> Ragged:
        """Compute when the results are requested, as on a CPU."""
        # Not inference_mode: the buffers that fully_shard gathers into were made outside of it.
        with torch.no_grad():
            return lay_out(compute(*copy_inputs(arrays, self._device)).cpu().numpy())
