"""The context of a benchmark: its options, the machine, and a way to report progress."""

import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Final

from benchmarks.machine import Machine, detect_machine
from benchmarks.tables import Report

ROOT: Final = Path(__file__).resolve().parents[1]
# Environments and converted models of peers: beside the code, not tracked, kept from run to run.
HOME: Final = ROOT / ".bench"

# Every benchmark, in the order in which they run: its module in benchmarks/questions, and the question it answers.
QUESTIONS: Final = {
    "machine": "What machine are the other figures of?",
    "start": "How long does `vectormill --help` take, and a stack until it is ready?",
    "idle": "What processor time does a stack take that has nothing to do?",
    "submission": "How fast are items taken in over HTTP, and how much memory does that take?",
    "export": "How fast do vectors come out over HTTP in each format, and how much memory does that take?",
    "main_job": "How fast is a whole job, beside sentence-transformers and our engine alone?",
    "host": "What does the host spend on a text when the device costs nothing, now and in another checkout?",
    "engine": "How fast are our service and engine beside all peers, on several mixes of texts?",
    "queries": "How many searches are answered with 1, 8 and 64 clients, beside a bulk job too?",
    "embeddings": "How many requests does /v1/embeddings answer, beside infinity's server?",
    "reindex": "What does it cost to keep an index in step with its table, beside CocoIndex?",
    "score": "How fast are pairs judged, beside CrossEncoder.predict?",
    "extract": "How fast are records extracted, beside the reference's way and in each placement?",
    "gpu": "Which switches of the encoder pay on this GPU?",
}
# This benchmark needs a card to itself for an hour, so it runs only when it is named.
GPU: Final = "gpu"


class BenchmarkFailed(Exception):
    """A benchmark could not be measured; the message says why."""


@dataclass(frozen=True)
class Harness:
    """The options of one run. An option that is empty or None leaves the choice to the benchmark.

    `items` replaces the number of texts; `mixes`, `systems` and `shapes` select some of several. `against` is
    another checkout of the project. `is_quick` asks for a size that only shows that everything works.
    """

    repeat: int = 3
    items: int | None = None
    device: str = "cpu"
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
    began: float = field(default_factory=time.monotonic)

    @cached_property
    def machine(self) -> Machine:
        """Return the machine with its matrix rates, which are measured before anything of ours runs."""
        self.say("measuring what the processor can do")
        return detect_machine()

    def say(self, sentence: str) -> None:
        """Print what begins now, for the person who waits."""
        print(f"{time.monotonic() - self.began:5.0f} s  {sentence}", file=sys.stderr, flush=True)

    def answer(self, name: str) -> Report:
        """Run one benchmark. Raise BenchmarkFailed or VectormillError when it cannot be measured."""
        self.say(f"{name}: {QUESTIONS[name]}")
        report: Report = import_module(f"benchmarks.questions.{name}").run(self)
        return report
