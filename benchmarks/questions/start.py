"""start: how long a user waits for `vectormill --help`, and for a stack to be ready."""

import subprocess
import time
from pathlib import Path
from typing import Final

from benchmarks.harness import Harness
from benchmarks.ours import OwnStack
from benchmarks.tables import SECONDS, Report, Spread, at_most, tabulate, told
from vectormill.cli.stack import COMMAND, workplace

NUM_HELPS: Final = 10


def run(harness: Harness) -> Report:
    help_seconds = Spread.of([time_help() for _ in range(NUM_HELPS)])
    first, later = [], []
    for number in range(harness.repeat):
        harness.say(f"starting twice, {number + 1} of {harness.repeat}")
        with workplace(None) as directory:
            first.append(time_start(directory))
            later.append(time_start(directory))
    measures = (
        at_most("vectormill --help", help_seconds, 0.4, SECONDS),
        told("up to ready, first start", Spread.of(first), SECONDS),
        told("up to ready, later start", Spread.of(later), SECONDS),
    )
    return Report(
        f"median of {NUM_HELPS} calls for help, and of {harness.repeat} starts.",
        (tabulate(measures),),
        (
            "The first start creates the cluster, migrates and converts the model; later ones find this done.",
            "Files are in the system's cache, as they are after an installation.",
        ),
    )


def time_help() -> float:
    started = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def time_start(directory: Path) -> float:
    """Return the seconds from `vectormill up` to its line `ready`, and stop the stack again."""
    started = time.perf_counter()
    with OwnStack(directory):
        return time.perf_counter() - started
