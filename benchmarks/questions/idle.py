"""idle: the processor time that a whole stack takes while it has nothing to do."""

import time
from typing import Final

from benchmarks.harness import Harness
from benchmarks.ours import OwnStack
from benchmarks.processes import count_cpu_seconds, subtract_readings
from benchmarks.tables import SHARE, Report, at_most, tabulate, told
from vectormill.cli.stack import workplace

SETTLE_SECONDS: Final = 20.0
WATCH_SECONDS: Final = 60.0


def run(harness: Harness) -> Report:
    settle, watch = (1.0, 5.0) if harness.is_quick else (SETTLE_SECONDS, WATCH_SECONDS)
    with workplace(None) as directory, OwnStack(directory) as stack:
        harness.say(f"settling for {settle:g} s, and watching it for {watch:g} s")
        time.sleep(settle)
        before, began = count_cpu_seconds(stack.pid), time.perf_counter()
        time.sleep(watch)
        after, seconds = count_cpu_seconds(stack.pid), time.perf_counter() - began
    spent = subtract_readings(after, before)
    measures = [at_most("all processes, of one core", sum(spent.values()) / seconds, 0.03, SHARE)]
    measures += [told(name, used / seconds, SHARE) for name, used in spent.items()]
    return Report(
        f"a stack without a job over {seconds:.0f} s, after {settle:g} s of settling.",
        (tabulate(measures),),
        ("User and system time as a share of one core, including processes that ended meanwhile.",),
    )
