"""submission: how fast items are taken in over HTTP, and how much memory that takes of the API."""

from typing import Final

from benchmarks.order import Order
from benchmarks.probes.memory import MemorySampler
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Measure, tabulate
from benchmarks.results.writing import write_mebibytes, write_number
from benchmarks.systems.own.own_api import OwnApi
from benchmarks.texts import list_lines
from vectormill.cli.stack import workplace
from vectormill.files.ndjson import encode_parts

NUM_ITEMS: Final = 200_000
NUM_FEW_ITEMS: Final = 1_000
RATE_TARGET: Final = 30_000
# "Less than 50 MB" is decimal.
GROWTH_TARGET_BYTES: Final = 50_000_000


def measure(order: Order) -> Report:
    num_items = order.items or NUM_ITEMS
    order.steps.begin("submission", 3 + order.repeat)
    order.steps.step("making the items")
    parts = list(encode_parts(list_lines(num_items)))
    few = list(encode_parts(list_lines(NUM_FEW_ITEMS)))
    with workplace(None) as directory:
        order.steps.step("starting Postgres and the API")
        with OwnApi(directory) as api:
            # The first submission of a fresh process: whatever is imported or opened at first use counts too.
            order.steps.step(f"{NUM_FEW_ITEMS:,} items")
            with MemorySampler([api.process]) as small:
                api.submit(few)
            seconds, growths = [], []
            for number in range(order.repeat):
                order.steps.step(f"{num_items:,} items, submission {number + 1} of {order.repeat}")
                with MemorySampler([api.process]) as large:
                    seconds.append(api.submit(parts))
                growths.append(large.peak_bytes - small.before_bytes)
    rate = Spread.of([num_items / each for each in seconds])
    num_bytes = sum(map(len, parts))
    measures = [
        Measure(
            f"items/s from the first byte to 202, {num_items:,} items",
            rate.describe(write_number),
            f"≥ {RATE_TARGET:,}",
            rate.median >= RATE_TARGET,
        ),
        Measure(
            f"the API's growth over {NUM_FEW_ITEMS:,} items",
            write_mebibytes(small.growth_bytes),
            "< 50 MB",
            small.growth_bytes < GROWTH_TARGET_BYTES,
        ),
        Measure(f"the API's growth over {num_items:,} items", Spread.of(growths).describe(write_mebibytes)),
        Measure("the API's memory before the first submission", write_mebibytes(small.before_bytes)),
    ]
    return Report(
        "submission",
        f"{num_items:,} lines of docstrings as NDJSON, {write_mebibytes(num_bytes)}, {order.repeat} submissions.",
        (tabulate(measures),),
        (
            "The NDJSON is ready before the time starts. Client, API and Postgres share the machine's cores.",
            "Growth is the peak of the API's resident memory above that before its first submission.",
        ),
    )
