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
    "machine": "On which machine were the other figures measured?",
    "start": "How long does `vectormill --help` take, and how long does a stack take to start?",
    "idle": "How much processor time does an idle stack use?",
    "submission": "How fast are items submitted over HTTP, and how much memory does that take?",
    "export": "How fast are vectors exported over HTTP in each format, and how much memory does that take?",
    "main_job": "How fast is a whole job, compared with sentence-transformers and our engine alone?",
    "host": "What does a text cost the host if the device takes no time, now and in another checkout?",
    "scale": "What does a text cost the host by reference, from Parquet to Parquet, compared with a collection?",
    "feeders": "How many texts a second does one device encode when several workers feed it?",
    "fleet": "How many chunks of how many workers does one Postgres carry, and what does a chunk cost it?",
    "engine": "How fast are our service and engine on several mixes of texts, compared with all peers?",
    "queries": "How many searches of 1, 8 and 64 clients are answered, also during a bulk job?",
    "embeddings": "How many requests does /v1/embeddings answer, compared with infinity's server?",
    "reindex": "What does it cost to keep an index up to date with its table, compared with CocoIndex?",
    "score": "How fast are pairs scored, compared with CrossEncoder.predict?",
    "extract": "How fast are records extracted in each placement, compared with the reference?",
    "placement": "What does each strategy reach and take on several devices, beside what the planner predicts?",
    "outputs": "What do several outputs of one pass cost, and what do the same bits in any batch?",
    "quotes": "How often do the intervals of a quote hold, over ten jobs that are quoted and then run?",
    "codes": "What do residual codes of multi-vectors save, and how do they rank documents?",
    "millions": "What do millions of rows take from job to search, beside the estimate, if the device takes no time?",
    "card": "What does this GPU reach in ten minutes, beside its ceilings and sentence-transformers?",
}
# These benchmarks need exclusive use of a card, so they run only if they are named; so does that of millions of rows,
# which takes hours.
CARD: Final = "card"
ONLY_NAMED: Final = (CARD, "millions")


class BenchmarkFailed(Exception):
    """A benchmark could not be measured; the message says why."""


@dataclass(frozen=True)
class Harness:
    """The options of one run. An option that is empty or None leaves the choice to the benchmark.

    `items` replaces the number of texts, and `rows` that of millions, whose index has the m and
    ef_construction of `graph`; `mixes`, `systems` and `shapes` select
    some of several. `against` is another checkout of the project. `is_quick` asks for a size that only shows
    that everything works. A card costs `price` dollars an hour.
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
    minutes: float = 9.5
    is_quick: bool = False
    is_written: bool = False
    rows: int | None = None
    graph: tuple[int, int] | None = None
    price: float = 3.5
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
