"""The benchmarks there are, in the order in which they run."""

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.cases import export, idle, machine, main_job, start, submission
from benchmarks.order import Order
from benchmarks.results.report import Report

BENCHMARKS: Final[Mapping[str, Callable[[Order], Report]]] = {
    "machine": machine.measure,
    "start": start.measure,
    "idle": idle.measure,
    "submission": submission.measure,
    "export": export.measure,
    "main_job": main_job.measure,
}
