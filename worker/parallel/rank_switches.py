"""Decide which switches the ranks of a model use, with reasons; all ranks reach the same decision.

Each rank decides for its own card, which may differ from its neighbour's, and then asks all others. A rank
that cannot use a switch that was requested by name raises instead, and ends its group with the reason.

Packed attention is compared with padding on all ranks at once before any rank uses it. Ranks that share a
model run every forward pass together: one that packs next to one that pads would wait for hidden states of
another shape, or add up values of different tokens; and one that leaves a pass midway because its kernel
raised leaves the others waiting. So a kernel that raises returns zeros, each rank completes the whole probe,
and only then do all exchange what they found.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from vectormill.models.families import find_family
from worker.batching.batch import Batch
from worker.encoder.choice import PACKED, choose_attention, read_attention_shape
from worker.encoder.encoder import Choice, EncoderOrder
from worker.encoder.switches import (
    PACKED_RANKS,
    QUEUED_RANKS,
    SwitchChoice,
    SwitchFacts,
    choose_switches,
    is_package_installed,
)
from worker.model.forms import Form
from worker.model.packed import Kernel, find_deviation, first_line, make_attention
from worker.model.runtime import transformers
from worker.parallel.rendezvous import ask_all
from worker.placement.placement import Rank

NOT_WANTED: Final = "it was not requested"


@dataclass(frozen=True, slots=True)
class RankSwitches:
    """The requested switches for ranks, on or off. `must_pack` is set if packed attention was requested."""

    choices: tuple[SwitchChoice, ...]
    must_pack: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the switches in use."""
        return tuple(choice.name for choice in self.choices if choice.is_on)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(choice.note for choice in self.choices if not choice.is_on)

    def refuse(self, name: str, reason: str) -> "RankSwitches":
        """Return the switches with this one off. Raises ModelError if it was requested by name."""
        if name == PACKED_RANKS and self.must_pack:
            raise ModelError(f"Packed attention cannot be used because {reason}; use padded or auto.")
        refused = (
            choice.refuse(reason) if choice.name == name and choice.is_on else choice
            for choice in self.choices
        )
        return RankSwitches(tuple(refused), self.must_pack)


def choose_rank_switches(order: EncoderOrder, rank: Rank, config: Any, precision: Choice) -> RankSwitches:
    """Return the switches that all ranks agree on; `config` is the transformer's.

    All ranks must call this.
    """
    shape = read_attention_shape(config)
    attention = choose_attention(order.attention, shape, order.device, precision.value)
    place = SwitchFacts(
        order.device,
        int(config.hidden_size),
        padded_because="" if attention.value == PACKED else attention.reason,
        is_shared=True,
    )
    chosen = {choice.name: choice for choice in choose_switches(order.switches, place, is_package_installed)}
    must_pack = order.attention == PACKED
    if must_pack:
        chosen[PACKED_RANKS] = SwitchChoice(PACKED_RANKS, True, "packed attention was requested", True)
    # Other switches were not meant for this model.
    of_ranks = [chosen[name] for name in sorted((PACKED_RANKS, QUEUED_RANKS)) if name in chosen]
    switches = RankSwitches(tuple(of_ranks), must_pack)
    if QUEUED_RANKS in switches.names and not find_family(shape.model_type).never_waits:
        reason = f"forward passes of the architecture {shape.model_type!r} wait for the device"
        switches = switches.refuse(QUEUED_RANKS, reason)
    for name in (PACKED_RANKS, QUEUED_RANKS):
        own = chosen[name].reason if name in chosen else NOT_WANTED
        objection = ask_all(rank, "" if name in switches.names else own)
        if objection and name in switches.names:
            switches = switches.refuse(name, objection)
    return switches


PROBED: Final = "vectormill_probed"

# Returns the hidden states [tokens, hidden size] that this rank ends up with for a probe; a stage returns its
# own.
Compute = Callable[[Form, Batch], Tensor]


class CapturingKernel:
    """A kernel that stores its first exception in `error` and returns zeros instead of raising it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.error: Exception | None = None

    def __call__(self, query: Tensor, *arguments: Any) -> Tensor:
        try:
            return self._kernel(query, *arguments)
        except Exception as error:  # noqa: BLE001 - a kernel that is missing or refuses a shape raises anything
            self.error = self.error or error
            return torch.zeros_like(query)


def find_flaw(
    transformer: nn.Module,
    padded: Form,
    packed: Form,
    kernel: Kernel,
    probes: Sequence[Batch],
    compute: Compute,
    ask_all: Callable[[str], str],
    *,
    has_last_states: bool,
) -> str:
    """Return what is wrong with packing, to complete a "because"; empty if nothing. The same on all ranks.

    The ranks first exchange whether kernels failed through `ask_all`, because the result of a failed kernel
    is missing on other ranks too. `has_last_states` is set if this rank ends up with the model's last hidden
    states, which depend on those of earlier stages. Raises ModelError if anything but the kernel ended the
    pass midway: the other ranks are then left waiting.
    """
    capturing = CapturingKernel(kernel)
    transformers.AttentionInterface.register(PROBED, make_attention(capturing))
    try:
        expected = [compute(padded, probe) for probe in probes]
        with attending(transformer, PROBED):
            found = [compute(packed, probe) for probe in probes]
        if found[0].is_cuda:
            torch.cuda.synchronize()  # a kernel's error is reported only by the next synchronization
    except Exception as error:
        raise ModelError(
            f"Packed attention broke a forward pass of this rank ({first_line(capturing.error or error)}) while the "
            "others wait for it; remove packed_ranks from VECTORMILL_WORKER_SWITCHES, or use padded attention."
        ) from error
    failed = "" if capturing.error is None else f"packed attention failed: {first_line(capturing.error)}"
    deviation = find_deviation(expected, found) if has_last_states else ""
    return ask_all(failed) or ask_all(
        f"packed attention deviates from padding: {deviation}" if deviation else ""
    )


@contextmanager
def attending(transformer: nn.Module, kernel: str) -> Iterator[None]:
    """Make the transformer attend with this kernel during the block."""
    before = str(transformer.config._attn_implementation)
    set_attention(transformer, kernel)
    try:
        yield
    finally:
        set_attention(transformer, before)


def set_attention(transformer: nn.Module, kernel: str) -> None:
    """Set the attention kernel of every layer; transformers' own function misses the layers of a stage."""
    for module in transformer.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = kernel
