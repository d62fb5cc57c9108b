"""main_job: the docstring corpus, HTTP to committed rows, beside `SentenceTransformer.encode` and our engine alone."""

from collections.abc import Mapping
from typing import Final

from benchmarks.cases.comparing import count_tokens, find_precision
from benchmarks.cases.engine.engine import find_limits
from benchmarks.cases.engine.pass_length import lengthen
from benchmarks.mixes import Mix
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.peers.catalogue import PEERS, SENTENCE_TRANSFORMERS
from benchmarks.probes.closeness import Closeness
from benchmarks.probes.machine import benchmark_device
from benchmarks.probes.model_cost import ModelCost
from benchmarks.results.comparison import GIGA
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
from benchmarks.systems.line_up import ENGINE, SERVICE, LineUp
from benchmarks.systems.turns import Record, Turns
from benchmarks.texts import list_docstrings
from vectormill.cli.stack import workplace
from vectormill.models.registry import DEFAULT_MODEL, Registry

DOCSTRINGS: Final = "docstrings"
PEER: Final = SENTENCE_TRANSFORMERS
SYSTEMS: Final = (SERVICE, ENGINE, PEER)
RATIO_TARGET: Final = 3.0
COSINE_TARGET: Final = 0.999


def measure(order: Order) -> Report:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    texts = tuple(item["text"] for item in list_docstrings(order.items))
    mix = Mix(DOCSTRINGS, "every docstring of the standard library", texts)
    if order.items is None:
        mix = lengthen(mix, card, order.machine.matrix_rates)
        texts = mix.texts
    order.steps.begin("main_job", Turns.count_steps(len(SYSTEMS), 1, order.repeat) + 2)
    with workplace(None) as directory:
        systems = LineUp(directory, card.path, [mix], benchmark_device()).make(SYSTEMS, PEERS)
        with Turns(systems, order.steps.step) as turns:
            records = turns.run(mix.name, order.repeat)
        if turns.failures:
            raise BenchmarkFailed(" ".join(turns.failures.values()))
        order.steps.step("measuring again what the processor can do")
        limits = find_limits(order)
    order.steps.step("comparing all vectors")
    closeness = {name: find_closeness(records[name], records[PEER]) for name in (SERVICE, ENGINE)}
    lengths = count_tokens(card, texts)
    flop = ModelCost.of(card).count_flop(lengths)
    rates = ", ".join(f"{precision} {write_number(rate)} GFLOP/s" for precision, rate in limits.items())
    return Report(
        "main_job",
        f"{mix.description}: {len(texts):,} texts, {int(lengths.sum()):,} tokens, {card.name}, "
        f"{order.repeat} passes of each.",
        (_compare_systems(records, len(texts), flop, limits), _judge(records, closeness)),
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


def find_closeness(record: Record, peer: Record) -> Closeness:
    assert record.vectors is not None, "they were read after the last pass"
    assert peer.vectors is not None, "so were these"
    return Closeness.between(record.vectors, peer.vectors)


def _compare_systems(
    records: Mapping[str, Record], num_texts: int, flop: float, limits: Mapping[str, float]
) -> Table:
    precisions = {record.name: find_precision(name, record) for name, record in records.items()}

    def row(record: Record) -> tuple[str, ...]:
        precision = precisions[record.name]
        limit = limits.get(precision, min(limits.values())) * GIGA
        num_tokens = record.passes[-1].num_tokens
        return (
            record.name,
            Spread.of(record.seconds()).describe(write_seconds),
            write_number(record.rate(num_texts).median),
            write_number(record.rate(num_tokens).median),
            record.speed_against(records[PEER]).describe(write_ratio),
            write_share(record.passes[-1].padding_waste),
            f"{write_share(record.rate(flop).median / limit)} of {precision}",
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
