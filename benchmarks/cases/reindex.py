"""reindex: what it costs to keep an index in step with its table, alone with a stub encoder, and beside CocoIndex."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_mebibytes, write_number, write_ratio, write_seconds, write_share
from benchmarks.systems.own.articles import Articles
from benchmarks.systems.own.own_indexer import OwnIndexer, seconds_of
from benchmarks.systems.own.updates import CocoIndexUpdates, OwnUpdates, Updates
from vectormill.cli.workplace import workplace
from vectormill.models.registry import DEFAULT_MODEL, Registry

# Of the stub's table; the cost of a row is compared with that of a tenth, and of ten times as many when so asked.
NUM_ROWS: Final = 100_000
NUM_ENCODED_ROWS: Final = 20_000
NUM_METADATA_CHANGES: Final = 10_000
CHANGED_SHARE: Final = 0.01

UNCHANGED_TARGET, CHANGED_TARGET = 0.015, 0.03
FLATNESS_TARGET: Final = 0.2
METADATA_SECONDS_TARGET: Final = 2.0
COMPARED_RATE_TARGET: Final = 150_000
BUILD_RATIO_TARGET, UPDATE_RATIO_TARGET = 1.5, 3.0


@dataclass(slots=True)
class Costs:
    """Seconds of each kind of run of one system over one table, and its memory at the peak, where it was read."""

    num_rows: int
    first: float = 0.0
    unchanged: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    metadata: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def measure(order: Order) -> Report:
    num_rows = order.items or NUM_ROWS
    sizes = (num_rows // 10, num_rows)
    num_encoded = min(num_rows, NUM_ENCODED_ROWS)
    order.steps.begin("reindex", len(sizes) * (1 + 3 * order.repeat) + 3 + 4 * order.repeat)
    with workplace(None) as directory:
        stubbed = [measure_stub(order, directory / str(size), size) for size in sizes]
    with workplace(None) as directory:
        ours, theirs = measure_beside_peer(order, directory, num_encoded)
    return Report(
        "reindex",
        f"A table of {num_rows:,} short lines with a stub as encoder, and of {num_encoded:,} with all-MiniLM-L6-v2.",
        (_tabulate_stub(stubbed), _tabulate_peers(ours, theirs), _judge(stubbed, ours, theirs)),
        (
            "The stub commits random vectors as fast as Postgres takes them: what is left is the re-index itself. "
            "The shares of the full run are those of the real model; with the stub a full run is mostly Postgres.",
            "The peer is CocoIndex from its package, as in its example of a Postgres source, with its own embedder; "
            "its model is loaded before the first build. Both follow the same table in the same Postgres, in turns.",
            "Each round changes other rows. Memory is the indexer's resident memory at its peak.",
        ),
    )


def measure_stub(order: Order, home: Path, num_rows: int) -> Costs:
    costs = Costs(num_rows)
    home.mkdir()
    home.chmod(0o711)
    with OwnIndexer(home, num_rows) as indexer:

        def reindex(what: str) -> float:
            order.steps.step(f"{num_rows:,} rows, {what}")
            run, peak_bytes = indexer.reindex()
            costs.peaks.append(peak_bytes)
            return seconds_of(run)

        costs.first = reindex("first build")
        for number in range(order.repeat):
            costs.unchanged.append(reindex("nothing changed"))
            indexer.articles.change_texts(CHANGED_SHARE, number)
            costs.changed.append(reindex("1 % changed"))
            indexer.articles.change_metadata(min(NUM_METADATA_CHANGES, num_rows // 10))
            costs.metadata.append(reindex("a tenth with other metadata"))
    return costs


def measure_beside_peer(order: Order, directory: Path, num_rows: int) -> tuple[Costs, Costs]:
    """Ours and the peer's, over one table with the real model."""
    model = Registry({}).card(DEFAULT_MODEL, weights=True).path
    with ExitStack() as exits:
        order.steps.step("starting both systems")
        own = exits.enter_context(OwnUpdates(directory))
        articles = Articles(own.database_url)
        articles.fill(0)
        own.follow()
        peer = exits.enter_context(CocoIndexUpdates(articles.dsn, model, directory))
        systems: tuple[Updates, Updates] = (own, peer)
        for system in systems:
            system.update()  # of an empty table: whatever is loaded at the first is loaded then
        articles.insert(num_rows)
        both = (Costs(num_rows), Costs(num_rows))
        for system, costs in zip(systems, both, strict=True):
            order.steps.step(f"{system.name} builds the index of {num_rows:,} rows")
            costs.first = system.update()
        for number in range(order.repeat):
            for system, costs in zip(systems, both, strict=True):
                order.steps.step(f"{system.name}, nothing changed")
                costs.unchanged.append(system.update())
            articles.change_texts(CHANGED_SHARE, number)
            for system, costs in zip(systems, both, strict=True):
                order.steps.step(f"{system.name}, 1 % changed")
                costs.changed.append(system.update())
        if own.count_rows() != num_rows:
            raise BenchmarkFailed(f"{own.count_rows():,} of {num_rows:,} rows are indexed.")
    return both


def _tabulate_stub(all_costs: Sequence[Costs]) -> Table:
    def row(costs: Costs) -> tuple[str, ...]:
        return (
            f"{costs.num_rows:,}",
            write_seconds(costs.first),
            Spread.of(costs.unchanged).describe(write_seconds),
            Spread.of(costs.changed).describe(write_seconds),
            Spread.of(costs.metadata).describe(write_seconds),
            write_number(costs.num_rows / Spread.of(costs.unchanged).median),
            write_mebibytes(max(costs.peaks)),
        )

    header = (
        "rows, stub", "first build", "nothing changed", "1 % changed", "metadata of a tenth", "rows/s compared",
        "memory",
    )  # fmt: skip
    return Table(header, tuple(row(costs) for costs in all_costs))


def _tabulate_peers(ours: Costs, theirs: Costs) -> Table:
    def row(name: str, costs: Costs) -> tuple[str, ...]:
        return (
            name,
            write_seconds(costs.first),
            Spread.of(costs.unchanged).describe(write_seconds),
            Spread.of(costs.changed).describe(write_seconds),
        )

    header = (f"{ours.num_rows:,} rows, all-MiniLM-L6-v2", "first build", "nothing changed", "1 % changed")
    return Table(header, (row("ours", ours), row("CocoIndex", theirs)))


def _judge(stubbed: Sequence[Costs], ours: Costs, theirs: Costs) -> Table:
    small, large = stubbed[0], stubbed[-1]
    rate = large.num_rows / Spread.of(large.unchanged).median
    flatness = (large.first / large.num_rows) / (small.first / small.num_rows) - 1
    metadata = Spread.of(large.metadata).median

    def share(of: Costs, seconds: list[float], target: float, what: str) -> Measure:
        value = Spread.of(seconds).median / of.first
        return Measure(
            f"{what}, share of the full run", write_share(value), f"≤ {target:.1%}", value <= target
        )

    def faster(seconds: list[float], peer: list[float], target: float, what: str) -> Measure:
        ratio = Spread.of([b / a for a, b in zip(seconds, peer, strict=True)])
        return Measure(
            f"{what}, to CocoIndex", ratio.describe(write_ratio), f"≥ {target:g}×", ratio.median >= target
        )

    return tabulate(
        [
            share(ours, ours.unchanged, UNCHANGED_TARGET, "nothing changed"),
            share(ours, ours.changed, CHANGED_TARGET, "1 % changed"),
            share(large, large.unchanged, UNCHANGED_TARGET, "with the stub, nothing changed"),
            share(large, large.changed, CHANGED_TARGET, "with the stub, 1 % changed"),
            faster([ours.first], [theirs.first], BUILD_RATIO_TARGET, "first build"),
            faster(ours.unchanged, theirs.unchanged, UPDATE_RATIO_TARGET, "nothing changed"),
            faster(ours.changed, theirs.changed, UPDATE_RATIO_TARGET, "1 % changed"),
            Measure(
                f"rows/s read and compared, {large.num_rows:,} rows",
                write_number(rate),
                f"≥ {COMPARED_RATE_TARGET:,}",
                rate >= COMPARED_RATE_TARGET,
            ),
            Measure(
                f"a row's cost in the first build, {large.num_rows:,} rows to {small.num_rows:,}",
                f"{flatness:+.0%}",
                f"± {FLATNESS_TARGET:.0%}",
                abs(flatness) <= FLATNESS_TARGET,
            ),
            Measure(
                "other metadata in a tenth of the rows",
                write_seconds(metadata),
                f"≤ {METADATA_SECONDS_TARGET:g} s",
                metadata <= METADATA_SECONDS_TARGET,
            ),
        ]
    )
