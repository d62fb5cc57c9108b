"""millions: minutes and memory of millions of rows through job, collection, index and search, beside the estimate.

The device takes no time, and gives texts vectors of their own: the sum of two of 8,192 random ones, so that rows lie in
clusters, as vectors of real texts do.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

import psutil

from benchmarks.harness import ROOT, BenchmarkFailed, Harness
from benchmarks.models import find_packaged
from benchmarks.ours import MODEL
from benchmarks.processes import PeakSampler, list_tree
from benchmarks.questions.host import Bench
from benchmarks.questions.quotes import measure_rows
from benchmarks.tables import MEBIBYTES, MIB, SECONDS, SHARE, Report, Table, tabulate, told, write_number
from benchmarks.texts import cut_words, list_lines
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.db.session import make_engine
from vectormill.domain.vector_type import DEFAULT_IN_COLLECTION
from vectormill.files.ndjson import ItemJson
from vectormill.quotes.estimate import Estimate
from vectormill.quotes.quote import HOST_TEXT_SECONDS, HOST_TOKEN_SECONDS, Workload, estimate_sizes

NUM_ROWS: Final = 5_000_000
NUM_WORDS: Final = 10
NUM_LINES: Final = 20_000
NUM_SEARCHES: Final = 100
COLLECTION: Final = "millions"
# The graph of five million rows fits into memory, which a service shares with much else.
ROOM: Final = {"VECTORMILL_INDEX_MEMORY_SHARE": "0.6"}
# A build of hours shows its progress more often than that.
PAUSE_SECONDS: Final = 1.0


def run(harness: Harness) -> Report:
    num_rows = harness.rows or NUM_ROWS
    card = find_packaged()
    m, ef_construction = harness.graph or (None, None)
    phases: dict[str, tuple[float, int, int]] = {}
    text_bytes = sum(len(each["text"].encode()) for each in make_items(10_000)) / 10_000
    with workplace(None) as directory:
        harness.say("starting the stack")
        with Bench(ROOT, directory / "stack", card, ROOM, has_own_vectors=True) as bench:
            client, engine = (
                bench.client,
                make_engine(bench.stack.running.database_url, application_name="benchmark"),
            )
            client.create_collection(COLLECTION, model=MODEL, index_policy="none")
            with measuring(harness, bench, "job", phases):
                submitted = client.submit(make_items(num_rows), model=MODEL, collection=COLLECTION)
                harness.say("it is submitted")
                job: Any = client.wait(submitted["id"], poll_seconds=1.0)
            if job["num_done"] != num_rows:
                raise BenchmarkFailed(f"The job ended {job['state']} with {job['num_done']:,} rows.")
            rows_bytes = measure_rows(engine, COLLECTION)
            with measuring(harness, bench, "index", phases):
                built = build_index(client, m, ef_construction)
            harness.say("searching")
            with measuring(harness, bench, "search", phases):
                milliseconds, share = search(client, num_rows)
            engine.dispose()
    shape = f"m = {m} and ef_construction = {ef_construction}" if m else "the graph that Vectormill chooses"
    tokens, cores = job["num_tokens"] / num_rows, psutil.cpu_count() or 1
    load = Workload(
        Estimate.exact(num_rows), Estimate.exact(tokens), DEFAULT_IN_COLLECTION, card.dimension, text_bytes,
        key_bytes=len(str(num_rows)), graph=harness.graph,
    )  # fmt: skip
    sizes = estimate_sizes(load, None, cores)
    host = (HOST_TEXT_SECONDS + Estimate.exact(HOST_TOKEN_SECONDS * tokens)) * (num_rows / cores)
    submitted_at, finished_at = (datetime.fromisoformat(job[name]) for name in ("created_at", "finished_at"))
    return Report(
        f"{num_rows:,} rows of {card.dimension} dimensions in float16, texts of {tokens:.1f} tokens; a device that "
        f"takes no time, {cores} cores; {shape}.",
        (
            Table(
                ("phase", "took", "estimated"),
                (
                    row("job, minutes", (finished_at - submitted_at).total_seconds() / 60, host * (1 / 60)),
                    row("rows on disk, MiB", rows_bytes / MIB, sizes["rows_bytes"] * (1 / MIB)),
                    row("index, minutes", built["seconds"] / 60, sizes["index_seconds"] * (1 / 60)),
                    row(
                        "memory of its build, MiB", phases["index"][2] / MIB, sizes["index_bytes"] * (1 / MIB)
                    ),
                ),
            ),
            Table(
                ("peak memory of all processes", "minutes", "peak", "growth"),
                tuple(
                    (name, write_number(seconds / 60), MEBIBYTES(peak), MEBIBYTES(growth))
                    for name, (seconds, peak, growth) in phases.items()
                ),
            ),
            tabulate(
                [
                    told("index on disk", built["num_bytes"], MEBIBYTES),
                    told("a search by text over HTTP", statistics.median(milliseconds) / 1000, SECONDS),
                    told("searches whose own row comes first", share, SHARE),
                ]
            ),
        ),
        ("Memory is proportional (Pss), read once a second, with Postgres and its shared memory.",),
    )


def row(name: str, took: float, estimated: Estimate) -> tuple[str, str, str]:
    least, most = write_number(estimated.least), write_number(estimated.most)
    return name, write_number(took), least if least == most else f"{least} to {most}"


def make_items(num_rows: int) -> Iterator[ItemJson]:
    """Yield rows of some words, no two equal."""
    lines = [cut_words(each["text"], NUM_WORDS) for each in list_lines(NUM_LINES)]
    for number in range(num_rows):
        yield {"key": str(number), "text": f"{number} {lines[number % len(lines)]}"}


@contextmanager
def measuring(
    harness: Harness, bench: Bench, name: str, phases: dict[str, tuple[float, int, int]]
) -> Iterator[None]:
    """Note the seconds of a phase, and the memory of all processes: its peak, and by how much it grew."""
    harness.say(f"{name} begins")
    started = time.perf_counter()
    with PeakSampler(lambda: count_bytes(bench.stack.pid), PAUSE_SECONDS) as sampler:
        yield
    phases[name] = time.perf_counter() - started, sampler.peak_bytes, sampler.growth_bytes


def count_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, in which shared pages count once."""
    total = 0
    for process in list_tree(pid):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def build_index(client: Client, m: int | None, ef_construction: int | None) -> dict[str, Any]:
    """Build the index of the collection, and return what its run tells of it."""
    asked = client.set_index(COLLECTION, policy="hnsw", m=m, ef_construction=ef_construction)
    run: Any = client.wait_run(asked["id"], poll_seconds=1.0)
    built = run["report"].get("indexing", {}).get("built")
    if not built:
        raise BenchmarkFailed(f"The index was not built; its run ended {run['state']}: {run['error']}")
    return dict(built[0])


def search(client: Client, num_rows: int) -> tuple[list[float], float]:
    """Search by texts of rows; return the milliseconds of each search, and the share that found its own row first."""
    milliseconds, num_found = [], 0
    wanted = {round(place * (num_rows - 1) / (NUM_SEARCHES - 1)) for place in range(NUM_SEARCHES)}
    for number, item in enumerate(make_items(num_rows)):
        if number not in wanted:
            continue
        started = time.perf_counter()
        matches = client.search(COLLECTION, item["text"], limit=10)
        milliseconds.append(1000 * (time.perf_counter() - started))
        num_found += matches[0]["key"] == item["key"]
    return milliseconds, num_found / len(wanted)
