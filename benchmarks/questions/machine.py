"""machine: the hardware facts behind the other figures."""

from benchmarks.harness import Harness
from benchmarks.tables import Report, Table


def run(harness: Harness) -> Report:
    return Report("what was measured on.", (Table(("fact", "value"), harness.machine.facts()),))
