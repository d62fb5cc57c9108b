"""start: how long a user waits for `vectormill --help`, and for a stack to be ready."""

import subprocess
import time
from pathlib import Path
from typing import Final

from benchmarks.order import Order
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, tabulate
from benchmarks.results.writing import write_seconds
from benchmarks.systems.own.own_stack import OwnStack
from vectormill.cli.stack import COMMAND, workplace

NUM_HELPS: Final = 10
HELP_TARGET_SECONDS: Final = 0.4


def measure(order: Order) -> Report:
    order.steps.begin("start", 1 + 2 * order.repeat)
    order.steps.step(f"vectormill --help, {NUM_HELPS} times")
    help_seconds = Spread.of([time_help() for _ in range(NUM_HELPS)])
    first, second = [], []
    for number in range(order.repeat):
        with workplace(None) as directory:
            order.steps.step(f"first start, {number + 1} of {order.repeat}")
            first.append(time_start(directory))
            order.steps.step(f"second start, {number + 1} of {order.repeat}")
            second.append(time_start(directory))
    measures = [
        Measure(
            "vectormill --help",
            help_seconds.describe(write_seconds),
            f"< {HELP_TARGET_SECONDS:g} s",
            help_seconds.median < HELP_TARGET_SECONDS,
        ),
        Measure("up to ready, first start", Spread.of(first).describe(write_seconds)),
        Measure("up to ready, later start", Spread.of(second).describe(write_seconds)),
    ]
    return Report(
        "start",
        f"median of {NUM_HELPS} calls for help, and of {order.repeat} starts.",
        (tabulate(measures),),
        (
            "A first start makes the cluster, migrates and converts the model; a later one finds all that done.",
            "Files are in the system's cache, as they are after an installation.",
        ),
    )


def time_help() -> float:
    """Seconds that one call of the command takes, the interpreter's own start included."""
    started = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def time_start(data_dir: Path) -> float:
    """Seconds from `vectormill up` to its line `ready`; stops it again."""
    started = time.perf_counter()
    with OwnStack(data_dir) as stack:
        stack.wait_until_ready()
        return time.perf_counter() - started
