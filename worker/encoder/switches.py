"""Switches turn on faster ways to run a network. This module lists them and chooses which an encoder uses.

Whether a switch pays depends on the card and the model, so none is on unless it was measured to pay there
(worker/tuning) or is requested by name. When a model is loaded, the network with a switch is compared with the network
without it, and a switch that changes results is turned off again (worker/model/switching.py). Imports no framework.
"""

import difflib
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Final

from vectormill.domain.errors import ConfigurationError, ModelError
from worker.devices.device import CUDA, Device
from worker.encoder.encoder import AUTO
from worker.encoder.way import Way

NONE: Final = "none"
C_COMPILER: Final = "C compiler"
# Names of earlier releases. What they turned on is now done wherever it is possible.
RETIRED: Final = frozenset({"direct_flash", "fused_qkv", "packed_ranks", "queued_ranks"})


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch. `does` describes it in a sentence; the other fields are its requirements besides packed attention.

    `smallest_capability` and `largest_capability` are compute capabilities, 90 for 9.0; a switch without
    either also works on a CPU. `package` is what it imports besides torch. A switch that `changes_vectors` by more
    than the rounding of 16 bits is tried only if it is named.
    """

    name: str
    does: str
    smallest_capability: int | None = None
    largest_capability: int | None = None
    package: str | None = None
    needs_compiler: bool = False
    changes_vectors: bool = False

    @property
    def capabilities(self) -> str:
        """Return the compute capabilities that the switch needs, in words."""
        first, last = ((each or 0) / 10 for each in (self.smallest_capability, self.largest_capability))
        return f"{first} to {last}" if last > first else f"{first}{'' if last else ' or higher'}"

    @property
    def needs(self) -> str:
        """Return the requirements of the switch in words."""
        parts = []
        if self.smallest_capability is not None:
            parts.append(f"compute capability {self.capabilities}")
        if self.package is not None:
            parts.append(f"the package {self.package}")
        if self.needs_compiler:
            parts.append(f"a {C_COMPILER}")
        return ", ".join([*parts, "packed attention"])


# The order in which they are tried and in which benchmarks list them.
SWITCHES: Final[Mapping[str, Switch]] = {
    switch.name: switch
    for switch in (
        Switch(
            "flash3",
            "FlashAttention 3 instead of torch's built-in FlashAttention 2.",
            smallest_capability=90,
            largest_capability=90,
            package="flash_attn_interface",
        ),
        Switch(
            "flash4",
            "FlashAttention 4 instead of torch's built-in FlashAttention 2.",
            smallest_capability=90,
            largest_capability=109,
            package="flash_attn.cute",
        ),
        Switch(
            "fused_gelu",
            "A product and the GELU behind it are one operation, which computes the tanh approximation of GELU.",
        ),
        Switch(
            "compile",
            "The layers are compiled at load (torch.compile), which fuses element-wise operations.",
            needs_compiler=True,
        ),
        Switch(
            "fp8",
            "Large products use 8-bit floats with a scale per row; vectors keep a cosine of 0.99 to those without it.",
            smallest_capability=89,
            changes_vectors=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class SwitchChoice:
    """A requested switch, on or off. `reason` says why it is on, or completes "off because"."""

    name: str
    is_on: bool
    reason: str
    is_asked: bool  # requested by name

    def refuse(self, reason: str) -> "SwitchChoice":
        """Return this choice turned off. Raises ModelError if the switch was requested by name."""
        if self.is_asked:
            raise ModelError(
                f"The switch {self.name} cannot be used because {reason}; "
                "remove it from VECTORMILL_WORKER_SWITCHES, or set that to auto or none."
            )
        return SwitchChoice(self.name, False, reason, False)

    @property
    def note(self) -> str:
        """Return the sentence of the worker's report about a switch that is off."""
        return f"The switch {self.name} is off because {self.reason}."


def is_installed(requirement: str) -> bool:
    """Return whether a package, or C_COMPILER, is installed on this machine."""
    if requirement == C_COMPILER:
        return any(map(shutil.which, ("gcc", "clang", "cc")))  # Triton looks for the first two
    name, *parts = requirement.split(".")
    spec = importlib.util.find_spec(name)
    for part in parts:  # find_spec of a module inside would import the package, which may fail or take memory
        name += f".{part}"
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None


def choose_switches(
    wanted: str,
    device: Device,
    padded_because: str,
    way: Way | None = None,
) -> tuple[SwitchChoice, ...]:
    """Return every requested switch, on or off, in the table's order.

    `wanted` is "auto", which takes those of the `way`, "none" or names with commas. `padded_because` is empty if
    batches are packed. Raises ModelError if a switch that was requested by name cannot be used.
    """
    names = parse_switches(wanted)
    if names is not None:
        asked = [SwitchChoice(name, True, "requested", True) for name in names]
    else:
        asked = [] if way is None else [SwitchChoice(name, True, way.reason, False) for name in way.switches]
    padded = padded_because and f"it needs packed attention, and batches are padded: {padded_because}"
    obstacles = [find_obstacle(choice.name, device) or padded for choice in asked]
    return tuple(
        choice.refuse(obstacle) if obstacle else choice
        for choice, obstacle in zip(asked, obstacles, strict=True)
    )


def parse_switches(wanted: str) -> tuple[str, ...] | None:
    """Return the named switches, without repeats, in the table's order; None for "auto".

    Beside auto may stand switches that it tries only if they are named. Names of earlier releases are left out. Raises
    ConfigurationError for unknown names.
    """
    names = _read_names(wanted) - RETIRED
    if names == {NONE}:
        return ()
    for name in sorted(names - {AUTO}):
        if name not in SWITCHES:
            if name == NONE:
                raise ConfigurationError(
                    "The switch none turns all others off; remove it, or the names beside it."
                )
            nearest = difflib.get_close_matches(name, [*SWITCHES, AUTO, NONE], n=1, cutoff=0)
            raise ConfigurationError(
                f"Unknown switch {name!r}; did you mean {nearest[0]}? Expected auto (those that are faster on the "
                f"GPU), none, or names from: {', '.join(SWITCHES)}."
            )
        if AUTO in names and not SWITCHES[name].changes_vectors:
            raise ConfigurationError(
                f"The switch {name} stands beside auto, which decides about it by itself; remove one of them."
            )
    return None if AUTO in names else tuple(name for name in SWITCHES if name in names)


def list_tried(wanted: str) -> tuple[str, ...]:
    """Return the switches that may be tried to find the fastest; none where they are named instead of auto."""
    if parse_switches(wanted) is not None:
        return ()
    named = _read_names(wanted)
    return tuple(name for name, switch in SWITCHES.items() if name in named or not switch.changes_vectors)


def describe_retired(wanted: str) -> str:
    """Return a sentence about names that earlier releases had; empty if there are none."""
    names = sorted(RETIRED & _read_names(wanted))
    if not names:
        return ""
    return (
        f"VECTORMILL_WORKER_SWITCHES names {' and '.join(names)}, which is no switch any more: "
        "it is on wherever it is possible. Remove it, or set auto to have the others measured."
    )


def _read_names(wanted: str) -> set[str]:
    return {name.strip() for name in wanted.split(",")}


def find_obstacle(name: str, device: Device) -> str:
    """Return why a switch cannot be used on a device, to complete a "because"; empty if it can."""
    switch = SWITCHES[name]
    smallest, largest = switch.smallest_capability, switch.largest_capability
    if smallest is not None:
        capability = device.compute_capability
        if device.kind != CUDA or capability is None:
            return (
                f"it needs a GPU with compute capability {switch.capabilities}, and {device.name} is not one"
            )
        if capability < smallest or (largest is not None and capability > largest):
            description = device.description or device.name
            return (
                f"it needs compute capability {switch.capabilities}, and {description} has {capability / 10}"
            )
    if switch.package is not None and not is_installed(switch.package):
        return f"the package {switch.package} is not installed"
    if switch.needs_compiler and not is_installed(C_COMPILER):
        return f"it needs a {C_COMPILER}, and none is installed"
    return ""
