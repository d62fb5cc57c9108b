"""idle: the processor time that a whole stack takes while it has nothing to do."""

import time
from collections.abc import Mapping
from typing import Final

from benchmarks.order import Order
from benchmarks.probes.process_tree import count_cpu_seconds, subtract_readings
from benchmarks.results.report import Report
from benchmarks.results.table import Measure, tabulate
from benchmarks.results.writing import write_share
from benchmarks.systems.own.own_stack import OwnStack
from vectormill.cli.stack import workplace

SETTLE_SECONDS: Final = 20.0
WATCH_SECONDS: Final = 60.0
SHARE_TARGET: Final = 0.03


def measure(order: Order) -> Report:
    order.steps.begin("idle", 3)
    order.steps.step("starting the stack")
    with workplace(None) as directory, OwnStack(directory) as stack:
        stack.wait_until_ready()
        order.steps.step(f"letting it settle for {SETTLE_SECONDS:g} s")
        time.sleep(SETTLE_SECONDS)
        order.steps.step(f"watching it for {WATCH_SECONDS:g} s")
        before, began = count_cpu_seconds(stack.pid), time.perf_counter()
        time.sleep(WATCH_SECONDS)
        after, seconds = count_cpu_seconds(stack.pid), time.perf_counter() - began
    return judge_shares(subtract_readings(after, before), seconds)


def judge_shares(spent: Mapping[str, float], seconds: float) -> Report:
    """The report on processor seconds by name of process."""
    total = sum(spent.values()) / seconds
    measures = [
        Measure(
            "all processes", write_share(total), f"< {SHARE_TARGET:.0%} of one core", total < SHARE_TARGET
        ),
        *(Measure(name, write_share(used / seconds)) for name, used in spent.items()),
    ]
    return Report(
        "idle",
        f"a stack without a job over {seconds:.0f} s, after {SETTLE_SECONDS:g} s of settling.",
        (tabulate(measures),),
        ("User and system time as a share of one core, those of processes that ended meanwhile included.",),
    )
