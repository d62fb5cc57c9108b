"""Run a network with torch on a CPU, with CUDA or on an Apple GPU, packed or padded."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CPU, CUDA
from worker.encoder.choice import (
    BF16,
    FP16,
    FP32,
    PACKED,
    PADDED,
    choose_attention,
    find_arithmetic,
    read_attention_shape,
)
from worker.encoder.encoder import AUTO, Choice, Deferred, Encoder, EncoderOrder, ForwardPass
from worker.encoder.outputs import WantedOutputs
from worker.encoder.switches import SWITCHES, SwitchChoice, choose_switches
from worker.model.cuda_pass import Compute, CudaPass, LayOut
from worker.model.forms import Form, PackedForm, PaddedForm, Part, compute_outputs, lay_out_outputs
from worker.model.network import EncoderNetwork, check_tokenizer, count_weight_bytes, list_token_inputs
from worker.model.packed import (
    EXACT,
    FLASH,
    PackedNetwork,
    PackingFailed,
    compute_probes,
    pack_network,
)
from worker.model.switching import JOINED, SwitchNotReverted, apply_switches
from worker.model.weights import apply_quantization
from worker.placement.footprint import COMPRESSED

logger = logging.getLogger(__name__)

DTYPES: Final = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}


class TorchEncoder(Encoder):
    """The encoder of one torch device: packed if that is exact and requested or faster, else padded."""

    def __init__(
        self, order: EncoderOrder, backend: Choice, precision: Choice, notes: tuple[str, ...] = ()
    ) -> None:
        start = time.perf_counter()
        self._card = order.card
        if order.device.kind == CPU:
            torch.set_num_threads(1 if order.is_reproducible else order.num_threads)
        # The process sees only its own GPU, because of its environment, so it is always the first.
        self._device = torch.device("cuda:0" if order.device.kind == CUDA else order.device.kind)
        self._network, attention, packed, switches = self._load(order, precision)
        transformer = self._network.transformer
        taken = transformer, list_token_inputs(transformer), self._network.modes
        self._form: Form = (
            PaddedForm(*taken, find_unattended(order.card))
            if packed is None
            else PackedForm(
                *taken,
                self._shape,
                packed.attention,
                shares_prefixes=packed.shares_prefixes,
            )
        )
        # Copies to the device use a separate stream, so that they do not wait for the current forward
        # pass.
        self._stream = torch.cuda.Stream() if order.device.kind == CUDA else None
        logger.info("%s uses %s attention: %s", order.card.name, attention.value, attention.reason)
        if order.device.kind == CUDA and packed is None and order.attention == AUTO:
            notes = (*notes, f"Batches are padded because {attention.reason}.")
        notes = (*notes, *(switch.note for switch in switches if not switch.is_on))
        self.note_loading(
            order,
            start,
            count_weight_bytes(order.card),
            backend=backend,
            precision=precision,
            attention=self._form.attention,
            notes=notes,
            is_packed=packed is not None,
            is_queued=self._stream is not None and find_family(self._shape.model_type).never_waits,
            switches=tuple(switch.name for switch in switches if switch.is_on and switch.name in SWITCHES),
            pools_passages=True,
        )

    def prepare(self, batch: Batch) -> ForwardPass:
        part, wanted = lay_out_outputs(self._form, batch, self._card)
        lay_out: LayOut = Ragged.from_matrix if wanted is None else partial(wanted.lay_out, self._card)
        compute = partial(self._compute, part, wanted)
        if self._stream is not None:
            return CudaPass(list(part.arrays.values()), compute, self._device, self._stream, lay_out=lay_out)
        tensors = [torch.from_numpy(array).to(self._device) for array in part.arrays.values()]
        return Deferred(partial(_compute_here, compute, tensors, lay_out))

    def _compute(self, part: Part, wanted: WantedOutputs | None, *arrays: Tensor) -> Tensor:
        """Return the results of a part whose arrays on the device are `arrays`."""
        tensors = dict(zip(part.arrays, arrays, strict=True))
        states = self._form.run(part, tensors, None)
        return compute_outputs(self._form, self._network.dense, self._network.heads, wanted, states, tensors)

    def _load(
        self, order: EncoderOrder, precision: Choice
    ) -> tuple[EncoderNetwork, Choice, PackedNetwork | None, tuple[SwitchChoice, ...]]:
        """Load the network with the requested switches.

        If a switch fails and cannot be undone, the network is loaded again without it.
        """
        refused: dict[str, SwitchChoice] = {}
        while True:
            network = load_network(order, precision.value, self._device)
            self._shape = read_attention_shape(network.transformer.config)
            attention, packed = self._load_attention(network, order, precision)
            try:
                return network, attention, packed, self._switch(order, attention, packed, refused)
            except SwitchNotReverted as error:
                refused[error.choice.name] = error.choice
                del network, packed  # frees their memory before the next load

    def _load_attention(
        self, network: EncoderNetwork, order: EncoderOrder, precision: Choice
    ) -> tuple[Choice, PackedNetwork | None]:
        """Return the attention and, if it is packed, the packed network, which was compared with padding.

        Raises ModelError if packing was requested and fails.
        """
        shape = replace(self._shape, has_unattended=find_unattended(order.card) is not None)
        attention = choose_attention(order.attention, shape, order.device, precision.value)
        if attention.value == PADDED:
            return attention, None
        kernel = FLASH if order.device.kind == CUDA else EXACT
        pack = partial(pack_network, network, kernel, self._shape, order.card.max_tokens, self._device)
        # A reproducible batch computes as many rows whatever its texts are.
        if self._shape.is_causal and not order.is_reproducible:
            try:
                return attention, pack(shares_prefixes=True)
            except PackingFailed as error:
                logger.warning("A prefix that texts share is computed for each of them: %s", error)
        try:
            return attention, pack()
        except PackingFailed as error:
            if order.attention == PACKED:
                raise ModelError(
                    f"Packed attention cannot be used because {error}; use padded or auto."
                ) from error
            return Choice(PADDED, str(error)), None

    def _switch(
        self,
        order: EncoderOrder,
        attention: Choice,
        packed: PackedNetwork | None,
        refused: Mapping[str, SwitchChoice],
    ) -> tuple[SwitchChoice, ...]:
        """Apply the requested switches to the packed network, and return each with whether it is on.

        Raises ModelError if a switch that was requested by name fails, and SwitchNotReverted if one cannot be undone.
        """
        padded_because = "" if packed is not None else attention.reason
        choices = choose_switches(order.switches, order.device, padded_because, order.way)
        if packed is None:
            return choices
        return apply_switches(
            packed,
            [refused.get(choice.name, choice) for choice in (JOINED, *choices)],
            partial(compute_probes, packed, self._shape, order.card.max_tokens, self._device),
        )


def find_unattended(card: ModelCard) -> int | None:
    """Return the token at the end of a text that no token attends to, if the model has one."""
    return None if card.token_head is None else card.token_head.unattended


def load_network(order: EncoderOrder, precision: str, device: torch.device) -> EncoderNetwork:
    """Load the network onto the device, with weights of this precision."""
    check_tokenizer(order.card)
    network = EncoderNetwork(order.card, DTYPES[find_arithmetic(precision, order.device)], order.on_read)
    if precision in COMPRESSED:
        apply_quantization(network.transformer)
    moved: EncoderNetwork = network.to(device)
    return moved


def _compute_here(compute: Compute, tensors: list[Tensor], lay_out: LayOut) -> Ragged:
    with torch.inference_mode():
        return lay_out(compute(*tensors).cpu().numpy())
