"""Order: what one run of the benchmarks is asked for, handed to each of them."""

from dataclasses import dataclass

from benchmarks.probes.machine import Machine
from benchmarks.steps import Steps


@dataclass(frozen=True, slots=True)
class Order:
    """`items` replaces each benchmark's own number of texts; None leaves it."""

    machine: Machine
    steps: Steps
    repeat: int = 3
    items: int | None = None


class BenchmarkFailed(Exception):
    """A benchmark could not be measured; the sentence says at what."""
