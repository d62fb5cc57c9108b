"""main_job: the docstring corpus, HTTP to committed rows, beside `SentenceTransformer.encode` and our engine alone."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.order import Order
from benchmarks.probes.closeness import Closeness
from benchmarks.probes.machine import benchmark_device
from benchmarks.probes.matrix_rate import GIGA, measure_matrix_rates
from benchmarks.probes.memory import MemorySampler
from benchmarks.probes.model_cost import ModelCost
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import (
    write_cosine,
    write_mebibytes,
    write_number,
    write_ratio,
    write_seconds,
    write_share,
)
from benchmarks.systems.child import ChildOrder, ChildSystem
from benchmarks.systems.service import Service
from benchmarks.systems.system import Pass, System
from benchmarks.texts import list_docstrings
from vectormill.cli.settings import read_environment
from vectormill.cli.workplace import workplace
from vectormill.files.ndjson import ItemJson
from vectormill.model_card import ModelCard
from vectormill.registry import DEFAULT_MODEL, Registry
from worker.devices.device import device_environment
from worker.model.choice import FP32, choose_precision
from worker.settings import load_worker_settings
from worker.tokens.tokenizer import Tokenizer

SERVICE: Final = "service"
ENGINE: Final = "engine"
PEER: Final = "peer"
RATIO_TARGET: Final = 3.0
COSINE_TARGET: Final = 0.999
# A pass takes seconds, and its memory changes with batches of a tenth of one.
SAMPLE_SECONDS: Final = 0.02


@dataclass(slots=True)
class Record:
    """What one system did in all passes."""

    name: str
    precision: str = FP32
    passes: list[Pass] = field(default_factory=list)
    model_peak_bytes: int = 0
    whole_peak_bytes: int = 0

    def seconds(self) -> list[float]:
        return [done.seconds for done in self.passes]

    def rate(self, count: float) -> Spread:
        """`count` of something per second."""
        return Spread.of([count / seconds for seconds in self.seconds()])

    def speed_against(self, other: "Record") -> Spread:
        """How many times faster, repetition by repetition: both sides of each ratio were measured side by side."""
        pairs = zip(other.seconds(), self.seconds(), strict=True)
        return Spread.of([theirs / ours for theirs, ours in pairs])


def measure(order: Order) -> Report:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    items = list_docstrings(order.items)
    order.steps.begin("main_job", 6 + 3 * order.repeat + 2)
    with workplace(None) as directory, ExitStack() as exits:
        systems = _start_systems(order, exits, directory, card, items)
        records = _run_passes(order, systems)
        limits = _measure_limits(order)
        order.steps.step("comparing all vectors")
        peer_vectors = systems[PEER].vectors()
        closeness = {
            name: Closeness.between(systems[name].vectors(), peer_vectors) for name in (SERVICE, ENGINE)
        }
    tokenizer = Tokenizer(card.path, lowercase=card.lowercase)
    lengths = tokenizer.tokenize([item["text"] for item in items], card.max_tokens, truncate=True).lengths
    flop = ModelCost.of(card).count_flop(lengths)
    rates = ", ".join(f"{precision} {write_number(rate)} GFLOP/s" for precision, rate in limits.items())
    return Report(
        "main_job",
        f"{len(items):,} docstrings, {int(lengths.sum()):,} tokens, {card.name}, {order.repeat} passes of each.",
        (_compare_systems(records, len(items), flop, limits), _judge(records, closeness)),
        (
            "Median of all passes, smallest and largest in brackets. Ratios are taken repetition by repetition.",
            "Tokens are real ones, special tokens included; padding is the share of the computed tokens beyond them.",
            f"The corpus takes {flop / 1e12:.2f} TFLOP: 2 per token and parameter that is multiplied with, and 4 × "
            "layers × length × hidden size for attention. The share of the limit is that, by the seconds, by the rate "
            f"of a matrix product: {rates}.",
            "Memory is resident, at its peak: of the process that holds the model, and with the worker that tokenizes "
            "and commits. Postgres and the API are not in it.",
        ),
    )


def _start_systems(
    order: Order, exits: ExitStack, directory: Path, card: ModelCard, items: Sequence[ItemJson]
) -> dict[str, System]:
    """All three, warm. While one encodes, the others wait and take next to no processor time."""
    texts = directory / "texts.json"
    texts.write_text(json.dumps([item["text"] for item in items]), encoding="utf-8")
    environment = read_environment()
    pinned = environment | device_environment(benchmark_device())

    def order_for(name: str) -> ChildOrder:
        return ChildOrder(
            str(card.path), str(texts), str(directory / f"{name}.npy"), str(directory / "cache")
        )

    systems: dict[str, System] = {
        SERVICE: Service(directory, items),
        ENGINE: ChildSystem("our engine alone", "benchmarks.systems.engine_alone", order_for(ENGINE), pinned),
        # In the user's own environment: its defaults, whatever they are there.
        PEER: ChildSystem(
            "SentenceTransformer.encode",
            "benchmarks.systems.sentence_transformer",
            order_for(PEER),
            environment,
        ),
    }
    for system in systems.values():
        order.steps.step(f"starting {system.name}")
        exits.enter_context(system)
        order.steps.step(f"warming up {system.name}")
        system.warm_up()
    return systems


def _run_passes(order: Order, systems: Mapping[str, System]) -> dict[str, Record]:
    """One pass of each in turn, so that a machine that slows down slows all of them."""
    ours = choose_precision(load_worker_settings().precision, benchmark_device()).value
    precisions = {SERVICE: ours, ENGINE: ours, PEER: FP32}
    records = {name: Record(system.name, precisions[name]) for name, system in systems.items()}
    for number in range(order.repeat):
        for name, system in systems.items():
            order.steps.step(f"{system.name}, pass {number + 1} of {order.repeat}")
            processes, record = system.find_processes(), records[name]
            with (
                MemorySampler(processes.model, SAMPLE_SECONDS) as model,
                MemorySampler(processes.whole, SAMPLE_SECONDS) as whole,
            ):
                record.passes.append(system.encode())
            record.model_peak_bytes = max(record.model_peak_bytes, model.peak_bytes)
            # The samples of the two are not taken at the same moments; the whole is never less than its part.
            record.whole_peak_bytes = max(record.whole_peak_bytes, whole.peak_bytes, record.model_peak_bytes)
    return records


def _measure_limits(order: Order) -> dict[str, float]:
    """The rates before and after the passes, the faster of each: another guest of the machine may have slowed one."""
    order.steps.step("measuring again what the processor can do")
    again = measure_matrix_rates(benchmark_device())
    return {precision: max(rate, again[precision]) for precision, rate in order.machine.matrix_rates.items()}


def _compare_systems(
    records: Mapping[str, Record], num_texts: int, flop: float, limits: Mapping[str, float]
) -> Table:
    def row(record: Record) -> tuple[str, ...]:
        limit = limits[record.precision] * GIGA
        num_tokens = record.passes[-1].num_tokens
        return (
            record.name,
            Spread.of(record.seconds()).describe(write_seconds),
            write_number(record.rate(num_texts).median),
            write_number(record.rate(num_tokens).median),
            record.speed_against(records[PEER]).describe(write_ratio),
            write_share(record.passes[-1].padding_waste),
            f"{write_share(record.rate(flop).median / limit)} of {record.precision}",
            write_mebibytes(record.model_peak_bytes),
            write_mebibytes(record.whole_peak_bytes),
        )

    header = (
        "system", "time", "texts/s", "tokens/s", "to the peer", "padding", "share of limit", "model's process",
        "and its worker",
    )  # fmt: skip
    return Table(header, tuple(row(record) for record in records.values()))


def _judge(records: Mapping[str, Record], closeness: Mapping[str, Closeness]) -> Table:
    ratio = records[SERVICE].speed_against(records[PEER])
    committed = closeness[SERVICE]
    return tabulate(
        [
            Measure(
                "HTTP to committed rows, to the peer",
                ratio.describe(write_ratio),
                f"≥ {RATIO_TARGET:g}×",
                ratio.median >= RATIO_TARGET,
            ),
            Measure(
                "smallest cosine of a committed vector to the peer's in fp32",
                write_cosine(committed.smallest),
                f"≥ {COSINE_TARGET}",
                committed.smallest >= COSINE_TARGET,
            ),
            Measure("mean cosine of the committed vectors", write_cosine(committed.mean)),
            Measure("smallest cosine of our engine's vectors", write_cosine(closeness[ENGINE].smallest)),
            Measure(
                "end to end, to the engine alone",
                records[SERVICE].speed_against(records[ENGINE]).describe(write_ratio),
            ),
        ]
    )
