"""scale: the host's cost per text from Parquet to Parquet, compared with the same texts into a collection.

Both jobs run in turn on one stack whose device takes no time: one sends its texts and stores vectors in a
collection, the other names a Parquet file and writes Parquet parts, next to it.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import ROOT, BenchmarkFailed, Harness
from benchmarks.models import find_packaged
from benchmarks.ours import MODEL
from benchmarks.questions.host import OTHERS, PROCESSES, Bench, count_seconds
from benchmarks.tables import NUMBER, RATIO, Report, Spread, Table, at_least, tabulate
from benchmarks.texts import ExactTexts
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.jobs.operations import JobBody

NUM_TEXTS: Final = 100_000
# The states of an output in which its manifest has been written.
CLOSED: Final = ("closed", "sweeping", "swept")
CLOSE_SECONDS: Final = 60.0
NUM_TOKENS: Final = 16
ROWS_PER_GROUP: Final = 20_000
COLLECTION: Final = "into a collection"
BY_REFERENCE: Final = "from Parquet to Parquet"


def run(harness: Harness) -> Report:
    card, texts = find_packaged(), ExactTexts(find_packaged().path)
    num_texts = harness.items or NUM_TEXTS
    passes: dict[str, list[dict[str, Any]]] = {COLLECTION: [], BY_REFERENCE: []}
    with workplace(None) as directory:
        folder = directory / "objects"
        folder.mkdir()
        variables = {"VECTORMILL_SOURCE_ROOT": str(folder), "VECTORMILL_OUTPUT_ROOT": str(folder)}
        harness.say("starting the stack")
        with Bench(ROOT, directory / "stack", card, variables) as bench:
            for number in range(harness.repeat):
                harness.say(f"{COLLECTION}, pass {number + 1} of {harness.repeat}")
                passes[COLLECTION].append(bench.run_job(texts.draw(NUM_TOKENS, num_texts)))
                harness.say(f"{BY_REFERENCE}, pass {number + 1} of {harness.repeat}")
                passes[BY_REFERENCE].append(
                    run_by_reference(bench, folder / str(number), texts.draw(NUM_TOKENS, num_texts))
                )
    return report(passes, num_texts)


def write_texts(path: Path, texts: list[str]) -> None:
    """Write the texts as a Parquet file with the columns `id` and `body`."""
    table = pa.table({"id": [f"text-{number}" for number in range(len(texts))], "body": texts})
    pq.write_table(table, path, row_group_size=ROWS_PER_GROUP)


def run_by_reference(bench: Bench, folder: Path, texts: list[str]) -> dict[str, Any]:
    """Write the texts as a Parquet file, and run the job that reads it and writes next to it."""
    folder.mkdir()
    write_texts(folder / "texts.parquet", texts)
    jobs = []

    def submit(client: Client) -> JobBody:
        job = client.submit_objects(
            f"file://{folder}/texts.parquet",
            text="body",
            key="id",
            model=MODEL,
            to=f"file://{folder}/vectors",
        )
        jobs.append(job)
        return job

    found = bench.measure(submit)
    until = time.monotonic() + CLOSE_SECONDS
    while (output := bench.client.job(jobs[0]["id"])["output"]) is not None and output["state"] not in CLOSED:
        if time.monotonic() > until:
            raise BenchmarkFailed(f"The manifest of {output['url']} is not there.")
        time.sleep(0.25)
    num_rows = sum(pq.read_metadata(path).num_rows for path in (folder / "vectors").glob("part-*.parquet"))
    if num_rows < len(texts):
        raise BenchmarkFailed(f"There are {num_rows:,} rows of {len(texts):,}.")
    return found


def report(passes: Mapping[str, list[dict[str, Any]]], num_texts: int) -> Report:
    def rates(name: str) -> list[float]:
        return [num_texts / (each["submission_seconds"] + each["seconds"]) for each in passes[name]]

    def micros(process: str) -> Callable[[str], str]:
        return lambda name: NUMBER(
            1e6 * statistics.median(count_seconds(each["cpu"], process) for each in passes[name]) / num_texts
        )

    columns: dict[str, Callable[[str], str]] = {
        "texts/s, with submission": lambda name: NUMBER(Spread.of(rates(name))),
        "submission": lambda name: (
            f"{NUMBER(statistics.median(each['submission_seconds'] for each in passes[name]))} s"
        ),
        **{f"{process}, µs a text": micros(process) for process in (*PROCESSES, OTHERS)},
    }
    ratio = Spread.of_ratios(rates(BY_REFERENCE), rates(COLLECTION))
    return Report(
        f"{num_texts:,} texts of {NUM_TOKENS} tokens, no two equal; a device that takes no time; passes in turn: "
        f"{len(passes[COLLECTION])}.",
        (
            tabulate([at_least(f"{BY_REFERENCE}, to {COLLECTION}", ratio, 1.5, RATIO)]),
            Table(
                ("100,000 texts" if num_texts == NUM_TEXTS else "texts", *columns),
                tuple((name, *(write(name) for write in columns.values())) for name in passes),
            ),
        ),
        (
            "Texts a second from the beginning of the submission to the last commit; vectors are float16 in the "
            "collection and float32 in Parquet. Merging parts and writing the manifest come afterwards.",
        ),
    )
