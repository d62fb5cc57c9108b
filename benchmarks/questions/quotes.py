"""quotes: how often the intervals of a quote hold, over ten jobs of real texts that are quoted and then run.

No text is in two jobs, so that no job is faster for what another one has computed.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Engine, text

from benchmarks.harness import BenchmarkFailed, Harness
from benchmarks.models import find_packaged
from benchmarks.ours import MODEL, OwnStack
from benchmarks.tables import SHARE, Report, Table, at_least, tabulate, write_number
from benchmarks.texts import (
    cut_words,
    list_docstrings,
    list_documents,
    list_lines,
    list_outliers,
    list_paragraphs,
    list_queries,
    unique,
)
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.collections.collection import LIVE
from vectormill.collections.collections import find_in_state
from vectormill.db.session import make_engine

# A worker has to measure its rate first, for some seconds on any processor.
NUM_WARMING: Final = 1500
PATIENCE_SECONDS: Final = 120.0
# Name of a job -> its number of texts, the function that lists candidates for them, and its options.
JOBS: Final[Mapping[str, tuple[int, Callable[[int], list[str]], dict[str, Any]]]] = {
    "few first sentences": (300, list_queries, {}),
    "many first sentences": (2500, list_queries, {}),
    "few paragraphs": (300, list_paragraphs, {}),
    "many paragraphs": (900, list_paragraphs, {}),
    "documents, cut": (70, list_documents, {}),
    "documents, in passages": (60, list_documents, {"long_texts": "passages"}),
    "a document to nine sentences": (600, list_outliers, {}),
    "lines, many repeated": (6000, lambda number: [each["text"] for each in list_lines(number)], {}),
    "docstrings": (2500, lambda number: [each["text"] for each in list_docstrings(number)], {}),
    "beginnings of 40 words": (
        1200,
        lambda number: [cut_words(each["text"], 40) for each in list_docstrings(number)],
        {},
    ),
}
# A quote is judged by these figures, which the table names so.
JUDGED: Final = ("tokens", "seconds", "bytes of rows")

MEASURE_ROWS: Final = text("""
    SELECT pg_relation_size(relation.oid) + pg_relation_size(index.indexrelid)
           + CASE WHEN reltoastrelid = 0 THEN 0 ELSE pg_relation_size(reltoastrelid) END
      FROM pg_class AS relation
      JOIN pg_index AS index ON index.indrelid = relation.oid AND index.indisprimary
     WHERE relation.oid = to_regclass(:table)
""")


@dataclass(frozen=True, slots=True)
class Judged:
    """One figure of a quote beside what the job took."""

    figure: Mapping[str, float]
    took: float

    @property
    def holds(self) -> bool:
        # Six digits, since a sum of floats may differ in the last.
        least, took, most = (
            float(f"{value:.6g}") for value in (self.figure["least"], self.took, self.figure["most"])
        )
        return least <= took <= most

    def write(self) -> str:
        least, most = (write_number(self.figure[name]) for name in ("least", "most"))
        wanted = least if least == most else f"{least} to {most}"
        return f"{wanted}; {write_number(self.took)}{'' if self.holds else ' **not held**'}"


def run(harness: Harness) -> Report:
    jobs = choose_texts(harness.items)
    found: dict[str, dict[str, Judged]] = {}
    variables = {
        "VECTORMILL_WORKER_REUSE_BYTES": str(64 << 20),
        "VECTORMILL_MODELS": json.dumps({MODEL: {"path": str(find_packaged().path)}}),
    }
    with workplace(None) as directory:
        harness.say("starting the stack")
        with OwnStack(directory / "data", variables, MODEL) as stack, Client(stack.url) as client:
            engine = make_engine(stack.running.database_url, application_name="benchmark")
            harness.say("letting the worker measure its rate")
            warming = [each["text"] for each in list_docstrings(NUM_WARMING)]
            client.wait(client.submit([f"warming: {each}" for each in warming], model=MODEL)["id"])
            wait_for_rate(client)
            for number, (name, texts) in enumerate(jobs.items()):
                harness.say(f"{name}, {len(texts):,} texts")
                found[name] = judge(client, engine, f"quoted_{number}", texts, JOBS[name][2])
            engine.dispose()
    held = {name: [each[name].holds for each in found.values()] for name in JUDGED}
    every = [holds for each in held.values() for holds in each]
    return Report(
        f"{len(jobs)} jobs of real texts with all-MiniLM-L6-v2, each quoted and then run.",
        (
            tabulate(
                [
                    at_least("intervals that held", sum(every) / len(every), 0.9, SHARE),
                    *((f"of {name}", f"{sum(each)} of {len(each)}", "") for name, each in held.items()),
                ]
            ),
            Table(
                ("quoted; took", "texts", *JUDGED),
                tuple(
                    (name, f"{len(texts):,}", *(found[name][each].write() for each in JUDGED))
                    for name, texts in jobs.items()
                ),
            ),
        ),
        (
            "Tokens are those of all rows, also of repeated ones; seconds are those from submission to last commit, "
            "bytes those of the rows and of the index of their keys.",
        ),
    )


def choose_texts(num_items: int | None) -> dict[str, list[str]]:
    """Return the texts of each job, none in two; a job of lines has some of its own lines several times."""
    used = {each["text"] for each in list_docstrings(NUM_WARMING)}
    chosen = {}
    for name, (number, list_texts, _) in JOBS.items():
        number = min(number, num_items or number)
        candidates = list_texts(4 * number)
        if name != "lines, many repeated":
            candidates = unique(candidates)
        texts = [each for each in candidates if each not in used][:number]
        used.update(texts)
        chosen[name] = texts
    return chosen


def wait_for_rate(client: Client) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while client.quote(["one text"], model=MODEL)["seconds"] is None:
        if time.monotonic() > deadline:
            raise BenchmarkFailed("No worker reported its rate.")
        time.sleep(0.5)


def judge(
    client: Client, engine: Engine, collection: str, texts: list[str], options: dict[str, Any]
) -> dict[str, Judged]:
    """Quote a job, run it, and return each judged figure beside what it took."""
    wanted: dict[str, Any] = {"model": MODEL, "collection": collection, **options}
    quote: Any = client.quote(texts, **wanted)
    job = client.wait(client.submit(texts, **wanted)["id"], poll_seconds=0.25)
    if job["state"] != "completed":
        raise BenchmarkFailed(f"The job ended {job['state']}.")
    created, finished = (datetime.fromisoformat(str(job[name])) for name in ("created_at", "finished_at"))
    num_bytes = measure_rows(engine, collection)
    tokens = {name: value * quote["rows"]["value"] for name, value in quote["tokens_per_row"].items()}
    return {
        "tokens": Judged(tokens, job["num_tokens"]),
        "seconds": Judged(quote["seconds"], (finished - created).total_seconds()),
        "bytes of rows": Judged(quote["rows_bytes"], num_bytes),
    }


def measure_rows(engine: Engine, collection: str) -> int:
    """Return the bytes of a collection's rows and of the index of their keys."""
    with engine.connect() as connection:
        generation = find_in_state(connection, collection, LIVE)
        assert generation is not None, "the job has made the collection"
        table = f"vectormill.{generation.table_name}"
        return int(connection.execute(MEASURE_ROWS, {"table": table}).scalar_one())
