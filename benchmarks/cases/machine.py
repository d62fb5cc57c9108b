"""machine: the facts that the other numbers are to be read with."""

from benchmarks.order import Order
from benchmarks.results.report import Report
from benchmarks.results.table import Table


def measure(order: Order) -> Report:
    order.steps.begin("machine", 1)
    order.steps.step("asking the machine")
    return Report("machine", "what was measured on.", (Table(("fact", "value"), order.machine.facts()),))
