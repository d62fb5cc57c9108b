"""The benchmarks there are, in the order in which they run, and how they are run one after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from benchmarks.cases import (
    collection,
    console,
    export,
    idle,
    interactive,
    machine,
    main_job,
    reindex,
    start,
    submission,
)
from benchmarks.cases.engine import engine, footprint, placement
from benchmarks.cases.gpu import gpu
from benchmarks.cases.host import host
from benchmarks.cases.queries import embeddings, queries
from benchmarks.cases.tasks import extract, score
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.results.report import Report
from vectormill.domain.errors import VectormillError

BENCHMARKS: Final[Mapping[str, Callable[[Order], Report]]] = {
    "machine": machine.measure,
    "start": start.measure,
    "idle": idle.measure,
    "submission": submission.measure,
    "export": export.measure,
    "main_job": main_job.measure,
    "host": host.measure,
    "engine": engine.measure,
    "interactive": interactive.measure,
    "queries": queries.measure,
    "embeddings": embeddings.measure,
    "console": console.measure,
    "reindex": reindex.measure,
    "collection": collection.measure,
    "placement": placement.measure,
    "footprint": footprint.measure,
    "score": score.measure,
    "extract": extract.measure,
    "gpu": gpu.measure,
}
# An hour of a card of its own: measured where it is named, and not with all others.
GPU: Final = "gpu"
# Those with a size that only shows that everything works.
QUICK: Final = (GPU, "score", "extract")


def run_benchmarks(names: Sequence[str], order: Order) -> Iterator[Report | BenchmarkFailed]:
    """What each found, as soon as it is known; one that cannot be measured does not end the others."""
    for name in names:
        try:
            report = BENCHMARKS[name](order)
        except (BenchmarkFailed, VectormillError) as error:
            yield BenchmarkFailed(f"{name} was not measured: {error}")
        else:
            order.steps.end()
            yield report
