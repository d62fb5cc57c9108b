"""The stack on devices that take the time of a GPU: how much of it they compute, and what a second worker adds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.cases.host.bench import Bench
from benchmarks.cases.host.host_texts import HostTexts
from benchmarks.models.random_weights import write_random_model
from benchmarks.models.shapes import SHAPES
from benchmarks.order import Order
from benchmarks.results.spread import Spread
from benchmarks.results.table import Table
from benchmarks.results.writing import write_number, write_ratio, write_share
from benchmarks.systems.host.devices import EIGHTH, KINDS, DeviceKind, find_shape_cost, find_text_rate
from benchmarks.systems.host.host_stack import JobCost
from benchmarks.systems.host.made_up import MadeUpDevice
from benchmarks.systems.host.tree import ROOT
from vectormill.models.model_card import ModelCard, read_model_card

SHAPE: Final = SHAPES["bert-base"]
# Each worker has its own half of the cores; the made-up device is one for both.
TWO_WORKERS: Final = {"VECTORMILL_WORKER_DEVICES": "cpu:0,cpu:1"}


@dataclass(frozen=True, slots=True)
class Setup:
    """A stack of its own. `settings` are those of its workers."""

    kind: DeviceKind
    num_workers: int
    settings: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.kind.name if self.num_workers == 1 else f"{self.kind.name}, {self.num_workers} workers"


SETUPS: Final = (
    Setup(EIGHTH, 1, {}),
    Setup(KINDS["H100"], 1, {}),
    Setup(KINDS["H100"], 2, TWO_WORKERS),
)


def count_steps(num_lengths: int, repeat: int) -> int:
    return 1 + len(SETUPS) * (1 + num_lengths * repeat)


def measure_timed(
    order: Order, texts: HostTexts, sizes: Mapping[int, int], directory: Path, tokenizer: Path
) -> Table:
    """Jobs in turns on every device; the slope is a second worker's, on the same device."""
    order.steps.step(f"writing a model of the shape {SHAPE.name}")
    card = write_card(directory, tokenizer)
    jobs: dict[tuple[str, int], list[JobCost]] = {}
    benches: dict[str, Bench] = {}
    with ExitStack() as exits:
        for setup in SETUPS:
            order.steps.step(f"starting the stack on {setup.name}")
            bench = Bench(
                setup.name,
                ROOT,
                directory / f"timed-{len(benches)}",
                card,
                make_maker(setup.kind),
                setup.settings,
            )
            benches[setup.name] = exits.enter_context(bench)
        for num_tokens, num_texts in sizes.items():
            for _ in range(order.repeat):
                for name, bench in benches.items():
                    order.steps.step(f"{num_tokens} tokens on {name}")
                    drawn = texts.draw(num_tokens, num_texts)
                    jobs.setdefault((name, num_tokens), []).append(bench.encode(drawn))
    devices = {name: bench.device for name, bench in benches.items()}
    return tabulate_timed(jobs, devices)


def write_card(directory: Path, tokenizer: Path) -> ModelCard:
    path = write_random_model(SHAPE, tokenizer, directory / "models" / SHAPE.name)
    return read_model_card(SHAPE.name, path)


def make_maker(kind: DeviceKind) -> Callable[[Path], MadeUpDevice]:
    return lambda clock: kind.make_device(find_shape_cost(SHAPE), clock)


def tabulate_timed(
    jobs: Mapping[tuple[str, int], Sequence[JobCost]], devices: Mapping[str, MadeUpDevice]
) -> Table:
    """One row a device and a length. A device with a second worker is compared with the same one without."""
    header = (f"{SHAPE.name} on", "it could", "texts/s", "device computed", "texts a batch", "to one worker")
    rows = []
    for (name, num_tokens), done in jobs.items():
        alone = jobs.get((name.partition(",")[0], num_tokens), done)
        slope = Spread.of([one.seconds / two.seconds for one, two in zip(alone, done, strict=True)])
        rows.append(
            (
                f"{name}: {num_tokens} tokens",
                f"{find_text_rate(devices[name], num_tokens):,.0f}",
                Spread.of([job.num_texts / job.seconds for job in done]).describe(write_number),
                Spread.of([job.device_seconds / job.seconds for job in done]).describe(write_share),
                write_number(statistics.median(job.num_texts / max(1, job.num_batches) for job in done)),
                "" if alone is done else slope.describe(write_ratio),
            )
        )
    return Table(header, tuple(rows))
