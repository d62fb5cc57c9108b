"""Switching: turns switches on in a packed network, one after another, each compared with the network without it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.functional import cosine_similarity

from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model.cuda_pass import is_device_lost
from worker.model.packed.attention import DIRECT
from worker.model.packed.network import SMALLEST_COSINE_16_BIT, SMALLEST_COSINES, PackedNetwork, first_line
from worker.model.switched.fused_projections import fuse_projections, split_projections
from worker.model.switched.scaled_products import scale_layers

logger = logging.getLogger(__name__)

# For each probe the hidden states of its tokens [tokens, dim].
ComputeProbes = Callable[[], list[Tensor]]
# Makes the network as it was before; None where that is lost.
Undo = Callable[[], object] | None


class NotUndone(Exception):
    """A switch failed behind which the network is not what it was: it has to be loaded again, without the switch."""

    def __init__(self, choice: SwitchChoice) -> None:
        super().__init__(choice.note)
        self.choice = choice


@dataclass(frozen=True, slots=True)
class Step:
    """A step that turns on one switch. The network is unchanged if that raises.

    `smallest_cosine` is that of a token's hidden state with and without it; None stands for that of two kernels in the
    arithmetic of the network.
    """

    turn_on: Callable[[PackedNetwork, ComputeProbes], Undo]
    smallest_cosine: float | None = None
    is_final: bool = False  # cannot be undone


def attend_directly(network: PackedNetwork, _: ComputeProbes) -> Undo:
    before = network.attention
    network.transformer.set_attn_implementation(DIRECT)
    return lambda: network.transformer.set_attn_implementation(before)


def attend_by_flash3(network: PackedNetwork, _: ComputeProbes) -> Undo:
    """Use FlashAttention 3 for all flash kernels of the process. Source: torch/nn/attention/_fa3.py."""
    activate_flash_attention_impl("FA3")
    return lambda: restore_flash_attention_impl()


def fuse(network: PackedNetwork, _: ComputeProbes) -> Undo:
    fuse_projections(network)
    return lambda: split_projections(network)


def compile_graphs(network: PackedNetwork, compute_probes: ComputeProbes) -> Undo:
    from worker.model.switched.compilation import (  # only now: it brings the compiler
        compile_layers,
        forget_graphs,
    )

    before = network.attention
    try:
        compile_layers(network, compute_probes)
    except BaseException:
        forget_graphs(network, before)
        raise
    return lambda: forget_graphs(network, before)


def multiply_in_8_bits(network: PackedNetwork, _: ComputeProbes) -> Undo:
    scale_layers(network)
    return None


# In the order in which they are turned on.
STEPS: Final[Mapping[str, Step]] = {
    "direct_flash": Step(attend_directly),
    "flash3": Step(attend_by_flash3),
    "fused_qkv": Step(fuse),
    # A product errs by 4 % of its length, in any direction, and so does a sum of them: 0.999. Models make more of it.
    "fp8": Step(multiply_in_8_bits, smallest_cosine=0.99, is_final=True),
    "compile": Step(compile_graphs),
}


def apply_switches(
    network: PackedNetwork,
    choices: Sequence[SwitchChoice],
    compute_probes: ComputeProbes,
    steps: Mapping[str, Step] = STEPS,
) -> tuple[SwitchChoice, ...]:
    """Return the choices, with those off that fail or differ, which leave the network as it was.

    Raises ModelError for one of them that was asked for by name, and when the device is lost; NotUndone.
    """
    settled = {choice.name: choice for choice in choices}
    wanted = [name for name in steps if name in settled and settled[name].is_on]
    expected = compute_probes() if wanted else []
    for name in wanted:
        found, flaw = _try_step(network, steps[name], compute_probes, expected)
        if flaw is None:
            expected = found
        else:
            settled[name] = settled[name].refuse(flaw)
            logger.warning(settled[name].note)
            if steps[name].is_final:
                raise NotUndone(settled[name])
    return tuple(settled.values())


def _try_step(
    network: PackedNetwork, step: Step, compute_probes: ComputeProbes, expected: list[Tensor]
) -> tuple[list[Tensor], str | None]:
    """Return the probes with the switch, and what is wrong with it, to stand behind "because"."""
    undo: Undo = None
    try:
        undo = step.turn_on(network, compute_probes)
        found = compute_probes()
        flaw = find_deviation(expected, found, step.smallest_cosine)
    except Exception as error:  # of a kernel, a compiler or a package, which raise anything
        if expected[0].is_cuda and is_device_lost():
            raise ModelError(
                f"A switch broke {expected[0].device} for this process ({first_line(error)}); "
                "say VECTORMILL_WORKER_SWITCHES=none."
            ) from error
        found, flaw = [], f"it failed: {first_line(error)}"
    if flaw is not None and undo is not None:
        undo()
    return found, flaw


def find_deviation(
    expected: Sequence[Tensor], found: Sequence[Tensor], smallest_cosine: float | None
) -> str | None:
    """Return the rest of a sentence; None where every token's state is as without the switch."""
    bound = smallest_cosine or SMALLEST_COSINES.get(expected[0].dtype, SMALLEST_COSINE_16_BIT)
    cosines = torch.cat(
        [
            cosine_similarity(one.float(), other.float(), dim=-1)
            for one, other in zip(expected, found, strict=True)
        ]
    )
    smallest = float(cosines.min())
    # Written so that NaN fails too.
    if not smallest >= bound:
        return f"with it the network deviates: the smallest cosine is {smallest:.4f}"
    return None
