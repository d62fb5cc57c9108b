"""Turns: systems encode the same texts one after the other, again and again, and what each did is recorded.

One that fails is left out from then on, with its reason: the others are measured all the same.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.order import BenchmarkFailed
from benchmarks.probes.memory import MemorySampler
from benchmarks.results.spread import Spread
from benchmarks.systems.protocol import Pass
from benchmarks.systems.system import System
from vectormill.domain.errors import VectormillError

# A pass takes seconds, and its memory changes with batches of a tenth of one.
SAMPLE_SECONDS: Final = 0.02
FAILURES: Final = (BenchmarkFailed, VectormillError, psutil.Error, OSError, ValueError)


@dataclass(slots=True)
class Record:
    """What one system did with one mix. `failure` says why it did nothing; then there are no passes."""

    name: str
    passes: list[Pass] = field(default_factory=list)
    model_peak_bytes: int = 0
    whole_peak_bytes: int = 0
    vectors: NDArray[np.float32] | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None

    def seconds(self) -> list[float]:
        return [done.seconds for done in self.passes]

    def rate(self, count: float) -> Spread:
        """`count` of something per second."""
        return Spread.of(self.rates(count))

    def rates(self, count: float) -> list[float]:
        """The same pass by pass."""
        return [count / seconds for seconds in self.seconds()]

    def speed_against(self, other: "Record") -> Spread:
        """How many times faster, repetition by repetition: both sides of each ratio were measured side by side."""
        pairs = zip(other.seconds(), self.seconds(), strict=True)
        return Spread.of([theirs / ours for theirs, ours in pairs])


class Turns:
    """A context manager around systems, by a key each. `say` is told each step: start, warm-up, and every pass."""

    def __init__(self, systems: Mapping[str, System], say: Callable[[str], None]) -> None:
        self._systems = systems
        self._say = say
        self._exits = ExitStack()
        self.failures: dict[str, str] = {}

    @staticmethod
    def count_steps(num_systems: int, num_mixes: int, repeat: int) -> int:
        """How often `say` is called."""
        return num_systems * (1 + num_mixes * (1 + repeat))

    def __enter__(self) -> "Turns":
        with ExitStack() as exits:
            for key, system in self._systems.items():
                self._say(f"starting {system.name}")
                self._try(key, partial(_enter, exits, system))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def run(self, mix: str, repeat: int) -> dict[str, Record]:
        """Warms all up, then has them encode the mix in turn, so that a machine that slows down slows all of them."""
        records = {key: Record(system.name) for key, system in self._systems.items()}
        for key, system in self._systems.items():
            self._say(f"{mix}: warming up {system.name}")
            self._try(key, partial(system.warm_up, mix))
        for number in range(repeat):
            for key, system in self._systems.items():
                self._say(f"{mix}: {system.name}, pass {number + 1} of {repeat}")
                self._try(key, partial(_encode, system, mix, records[key]))
        for key, system in self._systems.items():
            self._try(key, partial(_read, system, records[key]))
            if key in self.failures:
                records[key] = Record(system.name, failure=self.failures[key])
        return records

    def _try(self, key: str, act: Callable[[], object]) -> None:
        """Does nothing for a system that has failed; remembers the reason of one that fails now."""
        if key in self.failures:
            return
        try:
            act()
        except FAILURES as error:
            self.failures[key] = str(error)


def _enter(exits: ExitStack, system: System) -> None:
    """A System is a context manager, which its protocol says with methods alone."""
    system.__enter__()
    exits.push(system.__exit__)


def _encode(system: System, mix: str, record: Record) -> None:
    processes = system.find_processes()
    with (
        MemorySampler(processes.model, SAMPLE_SECONDS) as model,
        MemorySampler(processes.whole, SAMPLE_SECONDS) as whole,
    ):
        record.passes.append(system.encode(mix))
    record.model_peak_bytes = max(record.model_peak_bytes, model.peak_bytes)
    # The samples of the two are not taken at the same moments; the whole is never less than its part.
    record.whole_peak_bytes = max(record.whole_peak_bytes, whole.peak_bytes, record.model_peak_bytes)


def _read(system: System, record: Record) -> None:
    record.vectors, record.report = system.vectors(), system.report()
