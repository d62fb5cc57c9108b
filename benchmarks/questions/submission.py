"""submission: how fast the API accepts items over HTTP, and how much memory that takes."""

from typing import Final

from benchmarks.harness import Harness
from benchmarks.ours import OwnApi
from benchmarks.processes import sample_memory
from benchmarks.tables import MEBIBYTES, NUMBER, Report, Spread, at_least, at_most, tabulate, told
from benchmarks.texts import list_lines
from vectormill.cli.stack import workplace
from vectormill.files.ndjson import encode_parts

NUM_ITEMS: Final = 200_000
NUM_FEW_ITEMS: Final = 1_000


def run(harness: Harness) -> Report:
    num_items = harness.items or NUM_ITEMS
    parts = list(encode_parts(list_lines(num_items)))
    few = list(encode_parts(list_lines(NUM_FEW_ITEMS)))
    seconds, growths = [], []
    with workplace(None) as directory, OwnApi(directory) as api:
        # Measure the first submission of a fresh process, so that one-time imports and connections count too.
        with sample_memory([api.process]) as small:
            api.submit(few)
        for number in range(harness.repeat):
            harness.say(f"{num_items:,} items, submission {number + 1} of {harness.repeat}")
            with sample_memory([api.process]) as large:
                seconds.append(api.submit(parts))
            growths.append(large.peak_bytes - small.before_bytes)
    rate = Spread.of([num_items / each for each in seconds])
    measures = (
        at_least(f"items/s from the first byte to 202, {num_items:,} items", rate, 30_000, NUMBER),
        at_most(f"the API's growth over {NUM_FEW_ITEMS:,} items", small.growth_bytes, 50e6, MEBIBYTES),
        told(f"the API's growth over {num_items:,} items", Spread.of(growths), MEBIBYTES),
        told("the API's memory before the first submission", small.before_bytes, MEBIBYTES),
    )
    size = MEBIBYTES(sum(map(len, parts)))
    return Report(
        f"{num_items:,} lines of docstrings as NDJSON, {size}, {harness.repeat} submissions.",
        (tabulate(measures),),
        (
            "The NDJSON is prepared before the measurement starts. Client, API and Postgres share the machine's cores.",
            "Growth is the peak of the API's resident memory above that before its first submission.",
        ),
    )
