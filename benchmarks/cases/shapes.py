"""shapes: `engine` on models of random weights. Not there yet."""

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.results.report import Report


def measure(order: Order) -> Report:
    raise BenchmarkFailed(f"On {order.device} nothing is measured yet.")
