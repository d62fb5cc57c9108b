"""reindex: what it costs to keep an index in step with its table, alone with a stub encoder, and beside CocoIndex."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.memory import private_bytes
from benchmarks.probes.peak import PeakSampler
from benchmarks.probes.process_tree import group_by_name, list_tree
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_mebibytes, write_number, write_ratio, write_seconds, write_share
from benchmarks.systems.own.articles import Articles
from benchmarks.systems.own.own_indexer import OwnIndexer, seconds_of
from benchmarks.systems.own.updates import CocoIndexUpdates, OwnUpdates, Updates
from vectormill.cli.stack import workplace
from vectormill.domain.collection import HNSW
from vectormill.models.registry import DEFAULT_MODEL, Registry

# Of the table; with the stub the cost of a row is compared with that of a tenth, and of ten times as many.
NUM_ROWS: Final = 100_000
NUM_METADATA_CHANGES: Final = 10_000
CHANGED_SHARE: Final = 0.01

UNCHANGED_TARGET, CHANGED_TARGET = 0.015, 0.03
FLATNESS_TARGET: Final = 0.2
METADATA_SECONDS_TARGET: Final = 2.0
COMPARED_RATE_TARGET: Final = 150_000
BUILD_RATIO_TARGET, UPDATE_RATIO_TARGET = 1.5, 3.0
# Reading the memory of some thirty processes takes a millisecond or two.
MEMORY_PAUSE_SECONDS: Final = 0.05


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
    sizes = (num_rows // 10, num_rows, num_rows * 10)
    order.steps.begin(
        "reindex", len(sizes) * (1 + 3 * order.repeat) + (1 + order.repeat) + 5 + 4 * order.repeat
    )
    with workplace(None) as directory:
        stubbed = [measure_stub(order, directory / str(size), size) for size in sizes]
    with workplace(None) as directory:
        indexed = measure_indexed(order, directory / "indexed", num_rows)
    with workplace(None) as directory:
        memory = measure_memory(order, directory, (num_rows // 10, num_rows))
    with workplace(None) as directory:
        ours, theirs = measure_beside_peer(order, directory, num_rows)
    return Report(
        "reindex",
        f"A table of {num_rows:,} short lines, with a stub as encoder and with all-MiniLM-L6-v2.",
        (
            _tabulate_stub(stubbed),
            _tabulate_peers(ours, theirs),
            _tabulate_memory(num_rows, memory),
            _judge(stubbed, indexed, memory, ours, theirs),
        ),
        (
            "The stub commits random vectors as fast as Postgres takes them: what is left is the re-index itself. "
            "The shares of the full run are those of the real model; with the stub a full run is mostly Postgres.",
            "The peer is CocoIndex from its package, as in its example of a Postgres source, with its own embedder; "
            "its model is loaded before the first build. Both follow the same table in the same Postgres, in turns.",
            "Each round changes other rows. With the stub, memory is the indexer's resident memory at its peak; with "
            "the model, that of every process of the stack at the peak of a first build, and of a second one that "
            "brings nine times as many rows: without what a process shares with others, libraries and Postgres's "
            "buffers.",
            "The collection whose metadata alone change has an HNSW index.",
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


def measure_indexed(order: Order, home: Path, num_rows: int) -> list[float]:
    """Seconds of re-indexes that change nothing but metadata, of a collection with an HNSW index."""
    home.mkdir()
    home.chmod(0o711)
    seconds = []
    with OwnIndexer(home, num_rows, index_policy=HNSW) as indexer:
        order.steps.step(f"{num_rows:,} rows, first build with an index")
        indexer.reindex()
        for _ in range(order.repeat):
            indexer.articles.change_metadata(min(NUM_METADATA_CHANGES, num_rows // 10))
            order.steps.step("other metadata beside an index")
            run, _ = indexer.reindex()
            seconds.append(seconds_of(run))
    return seconds


def measure_memory(order: Order, directory: Path, sizes: tuple[int, int]) -> dict[str, list[int]]:
    """Bytes of every process of the stack by its name, at the peak of a build up to each of these sizes."""
    peaks: dict[str, list[int]] = {}
    with OwnUpdates(directory) as own:
        articles = Articles(own.database_url)
        articles.fill(0)
        own.follow()
        own.update()
        for before, size in zip((0, *sizes), sizes, strict=False):
            articles.insert(size - before, first=before)
            order.steps.step(f"memory, up to {size:,} rows")
            with ExitStack() as exits:
                samplers = {
                    name: exits.enter_context(
                        PeakSampler(partial(private_bytes, processes), MEMORY_PAUSE_SECONDS)
                    )
                    for name, processes in group_by_name(list_tree(own.pid)).items()
                }
                own.update()
            for name, sampler in samplers.items():
                peaks.setdefault(name, []).append(sampler.peak_bytes)
    return {name: found for name, found in peaks.items() if len(found) == len(sizes)}


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


def _tabulate_memory(num_rows: int, memory: dict[str, list[int]]) -> Table:
    header = ("process, all-MiniLM-L6-v2", f"up to {num_rows // 10:,} rows", f"up to {num_rows:,} rows")
    rows = [
        (name, *map(write_mebibytes, peaks))
        for name, peaks in sorted(memory.items(), key=lambda found: -found[1][-1])
    ]
    return Table(header, tuple(rows))


def _judge(
    stubbed: Sequence[Costs],
    indexed: Sequence[float],
    memory: dict[str, list[int]],
    ours: Costs,
    theirs: Costs,
) -> Table:
    small, middle, large = stubbed
    rate = middle.num_rows / Spread.of(middle.unchanged).median
    metadata = Spread.of(indexed)
    growth = max((after - before for before, after in memory.values()), default=0)

    def flat(seconds: Callable[[Costs], float], what: str) -> Measure:
        change = (seconds(large) / large.num_rows) / (seconds(small) / small.num_rows) - 1
        return Measure(
            f"a row's cost, {what}, {large.num_rows:,} rows to {small.num_rows:,}",
            f"{change:+.0%}",
            f"± {FLATNESS_TARGET:.0%}",
            abs(change) <= FLATNESS_TARGET,
        )

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
            share(middle, middle.unchanged, UNCHANGED_TARGET, "with the stub, nothing changed"),
            share(middle, middle.changed, CHANGED_TARGET, "with the stub, 1 % changed"),
            faster([ours.first], [theirs.first], BUILD_RATIO_TARGET, "first build"),
            faster(ours.unchanged, theirs.unchanged, UPDATE_RATIO_TARGET, "nothing changed"),
            faster(ours.changed, theirs.changed, UPDATE_RATIO_TARGET, "1 % changed"),
            Measure(
                f"rows/s read and compared, {middle.num_rows:,} rows",
                write_number(rate),
                f"≥ {COMPARED_RATE_TARGET:,}",
                rate >= COMPARED_RATE_TARGET,
            ),
            flat(lambda costs: costs.first, "first build"),
            flat(lambda costs: Spread.of(costs.unchanged).median, "nothing changed"),
            Measure(
                f"the indexer's memory, {large.num_rows:,} rows above {small.num_rows:,}",
                write_mebibytes(max(large.peaks) - max(small.peaks)),
            ),
            Measure("growth of any process, ten times the rows", write_mebibytes(growth)),
            Measure(
                f"other metadata in {min(NUM_METADATA_CHANGES, middle.num_rows // 10):,} rows, beside an index",
                metadata.describe(write_seconds),
                f"≤ {METADATA_SECONDS_TARGET:g} s",
                metadata.median <= METADATA_SECONDS_TARGET,
            ),
        ]
    )
