"""reindex: the cost of keeping an index up to date with its table, compared with CocoIndex, with the real model."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from benchmarks.articles import CHANGE_METADATA, CHANGE_TEXTS, COLLECTION, CocoIndex, OwnIndex
from benchmarks.harness import BenchmarkFailed, Harness
from benchmarks.models import find_packaged
from benchmarks.tables import (
    NUMBER,
    RATIO,
    SECONDS,
    SHARE,
    Report,
    Spread,
    Table,
    at_least,
    at_most,
    tabulate,
)
from vectormill.cli.stack import workplace

NUM_ROWS: Final = 100_000
MOST_METADATA: Final = 10_000


@dataclass(slots=True)
class Costs:
    """The seconds of each kind of run."""

    first: float = 0.0
    unchanged: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)


def run(harness: Harness) -> Report:
    num_rows = harness.items or NUM_ROWS
    costs = (Costs(), Costs())
    with workplace(None) as directory, ExitStack() as exits:
        harness.say("starting both systems")
        own = exits.enter_context(OwnIndex(directory))
        own.follow()
        peer = exits.enter_context(CocoIndex(own.dsn, find_packaged().path, directory))
        systems: tuple[OwnIndex | CocoIndex, ...] = (own, peer)
        for system in systems:
            system.update()  # on an empty table, which loads all that a first update loads
        own.fill(num_rows)
        for system, each in zip(systems, costs, strict=True):
            harness.say(f"{system.name} builds the index of {num_rows:,} rows")
            each.first = system.update()
        for number in range(harness.repeat):
            harness.say(f"nothing changed, then 1 % changed, round {number + 1} of {harness.repeat}")
            for system, each in zip(systems, costs, strict=True):
                each.unchanged.append(system.update())
            own.execute(CHANGE_TEXTS, round=number)
            for system, each in zip(systems, costs, strict=True):
                each.changed.append(system.update())
        if own.client.collection(COLLECTION, exact=True)["exact_rows"] != num_rows:
            raise BenchmarkFailed(f"Not all of {num_rows:,} rows are indexed.")
        metadata = []
        num_metadata = min(MOST_METADATA, num_rows // 10)
        own.client.wait_run(own.client.set_index(COLLECTION, policy="hnsw")["id"])
        for _ in range(harness.repeat):
            harness.say("other metadata beside an index")
            own.execute(CHANGE_METADATA, count=num_metadata)
            metadata.append(own.update())
    ours, theirs = costs
    rate = num_rows / Spread.of(ours.unchanged).median
    measures = (
        at_most(
            "nothing changed, share of the full run",
            Spread.of(ours.unchanged).median / ours.first,
            0.015,
            SHARE,
        ),
        at_most(
            "1 % changed, share of the full run", Spread.of(ours.changed).median / ours.first, 0.03, SHARE
        ),
        at_least("first build, to CocoIndex", theirs.first / ours.first, 1.5, RATIO),
        at_least(
            "nothing changed, to CocoIndex", Spread.of_ratios(theirs.unchanged, ours.unchanged), 3.0, RATIO
        ),
        at_least("1 % changed, to CocoIndex", Spread.of_ratios(theirs.changed, ours.changed), 3.0, RATIO),
        at_least(f"rows/s read and compared, {num_rows:,} rows", rate, 150_000, NUMBER),
        at_most(
            f"other metadata in {num_metadata:,} rows, beside an index", Spread.of(metadata), 2.0, SECONDS
        ),
    )
    return Report(
        f"A table of {num_rows:,} short lines with all-MiniLM-L6-v2.",
        (tabulate_costs(num_rows, zip(("ours", "CocoIndex"), costs, strict=True)), tabulate(measures)),
        (
            "The peer is the CocoIndex package, used as in its example of a Postgres source, with its own embedder; "
            "its model is loaded before the first build. Both follow the same table in the same Postgres, in turns.",
            "Each round changes different rows. If nothing or only metadata has changed, nothing is encoded, and the "
            "figure is the cost of the re-index itself. Metadata is changed in a collection with an HNSW index.",
        ),
    )


def tabulate_costs(num_rows: int, costs: Iterable[tuple[str, Costs]]) -> Table:
    header = (f"{num_rows:,} rows, all-MiniLM-L6-v2", "first build", "nothing changed", "1 % changed")
    rows = [
        (name, SECONDS(each.first), SECONDS(Spread.of(each.unchanged)), SECONDS(Spread.of(each.changed)))
        for name, each in costs
    ]
    return Table(header, tuple(rows))
