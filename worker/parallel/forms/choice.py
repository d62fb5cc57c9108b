"""RankSwitches: the switches of ranks, with reasons. The same on every rank, since each takes what all agree to.

Each rank decides by its own card, which may be another than its neighbour's, and then asks them all. A rank that was
asked by name for what cannot be raises instead, and ends its group with the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from vectormill.domain.errors import ModelError
from worker.encoder.encoder import Choice, EncoderOrder
from worker.encoder.switches import (
    PACKED_RANKS,
    QUEUED_RANKS,
    SwitchChoice,
    SwitchFacts,
    choose_switches,
    is_package_installed,
)
from worker.model.architectures import PACKED, WAITLESS, choose_attention, read_attention_shape
from worker.parallel.meeting import ask_all
from worker.placement.rank import Rank

NOT_WANTED: Final = "it is not asked for"


@dataclass(frozen=True, slots=True)
class RankSwitches:
    """`must_pack` when packed attention was asked for, by a setting that is older than the switches."""

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
        """Return the switches with this one off. Raises ModelError when it was asked for."""
        if name == PACKED_RANKS and self.must_pack:
            raise ModelError(f"Packed attention cannot be used, because {reason}; use padded or auto.")
        refused = (
            choice.refuse(reason) if choice.name == name and choice.is_on else choice
            for choice in self.choices
        )
        return RankSwitches(tuple(refused), self.must_pack)


def choose_rank_switches(order: EncoderOrder, rank: Rank, config: Any, precision: Choice) -> RankSwitches:
    """Return what all ranks agree to; `config` is the transformer's. Every rank must call it, and waits."""
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
        chosen[PACKED_RANKS] = SwitchChoice(PACKED_RANKS, True, "packed attention is asked for", True)
    switches = RankSwitches(tuple(_of_ranks(chosen.values())), must_pack)
    if QUEUED_RANKS in switches.names and shape.model_type not in WAITLESS:
        reason = f"a forward pass of the architecture {shape.model_type!r} waits for the device"
        switches = switches.refuse(QUEUED_RANKS, reason)
    for name in (PACKED_RANKS, QUEUED_RANKS):
        own = chosen[name].reason if name in chosen else NOT_WANTED
        objection = ask_all(rank, "" if name in switches.names else own)
        if objection and name in switches.names:
            switches = switches.refuse(name, objection)
    return switches


def _of_ranks(choices: Iterable[SwitchChoice]) -> list[SwitchChoice]:
    """Return the switches of ranks. Those of single devices were not meant for this model."""
    return sorted(
        (choice for choice in choices if choice.name in (PACKED_RANKS, QUEUED_RANKS)),
        key=lambda choice: choice.name,
    )
