"""Order: what one run of the benchmarks is asked for, handed to each of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.probes.machine import Machine
from benchmarks.steps import Steps

CPU: Final = "cpu"
CUDA: Final = "cuda"


@dataclass(frozen=True, slots=True)
class Order:
    """`items` replaces each benchmark's own number of texts; None leaves it.

    What follows concerns `engine` alone: which mixes and systems (all of them where none is named), and how many tokens
    of a text are read (as many as the model's own card says). Where to measure, and which shapes of models, concerns
    `placement` and `footprint` too. `against` is another checkout of the project, of
    `host` alone. `is_quick` says that the mechanics alone are of interest. The rest is of `gpu`:
    where its records are, steps to be repeated, the minutes it may take, and whether the defaults of the card are to be
    written.
    """

    machine: Machine
    steps: Steps
    repeat: int = 3
    items: int | None = None
    device: str = CPU
    mixes: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    max_tokens: int | None = None
    against: Path | None = None
    state: Path | None = None
    again: tuple[str, ...] = ()
    minutes: float = 40.0
    is_quick: bool = False
    is_written: bool = False


class BenchmarkFailed(Exception):
    """A benchmark could not be measured; the sentence says at what."""
