"""extract: records of five schemas from real texts, by the reference's method, our engine and our service.

The engine is also measured in each way in which two devices can hold the model; on a processor these are its
halves.

The weights are random, in the shape of DeBERTa-base and the published layout: a forward pass takes as long as
with trained ones, but records serve only to check that two systems agree.
"""

import json
from typing import Any, Final

import numpy as np

from benchmarks.children.engine_alone import DATA_PARALLEL, PIPELINED, SINGLE
from benchmarks.children.extraction import NUM_CHARS, SCHEMAS, digest_records, list_tagged_texts, split_tag
from benchmarks.harness import Harness
from benchmarks.machine import benchmark_device
from benchmarks.models import find_packaged
from benchmarks.ours import ENGINE, SERVICE, LineUp
from benchmarks.peers import Peer
from benchmarks.random_extractor import BASE, TINY, write_random_extractor
from benchmarks.tables import MEBIBYTES, NUMBER, RATIO, SHARE, Measure, Report, at_least, tabulate, told
from benchmarks.turns import Record, System, Turns
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.domain.schema import list_types

MIX: Final = "five schemas"
NUM_TEXTS: Final = 60
REFERENCE: Final = "reference"
ALONE: Final = "alone"
ONE_AT_A_TIME: Final = "benchmarks.children.one_at_a_time"
# Texts per second that were published for RexUniNLU on one and on two GPUs.
PUBLISHED: Final = {SINGLE: 45, DATA_PARALLEL: 82, PIPELINED: 88}
# The planner's ways to use two devices, beside the figures that were published for them.
WAYS: Final = {
    SINGLE: "single, half of the processor",
    DATA_PARALLEL: "data parallel, two replicas",
    PIPELINED: "pipeline",
}


def run(harness: Harness) -> Report:
    texts = list_tagged_texts(harness.items or (10 if harness.is_quick else NUM_TEXTS))
    with workplace(None) as directory:
        model = write_random_extractor(
            TINY if harness.is_quick else BASE, find_packaged().path, directory / "model"
        )
        line_up = LineUp(directory, model, {MIX: texts}, benchmark_device())
        title = "the reference's way: one at a time, transformers' encoder"
        reference = Peer(REFERENCE, title, ONE_AT_A_TIME, options={"encoder": "transformers"})
        systems: dict[str, System] = {
            REFERENCE: line_up.make_peer(reference),
            ALONE: line_up.make_peer(Peer(ALONE, "one at a time, our network", ONE_AT_A_TIME)),
            ENGINE: line_up.make_engine(task="extract"),
            SERVICE: line_up.make_service({MIX: list_jobs(texts)}, read=read, collect=digest_records),
            **{way: line_up.make_engine(name, task="extract", way=way) for way, name in WAYS.items()},
        }
        with Turns(systems, harness) as turns:
            records = turns.run(MIX, harness.repeat)

    def share_of_equal(record: Record) -> float | None:
        """Return the share of the texts whose records equal those of the reference's method."""
        found, expected = record.vectors, records[REFERENCE].vectors
        return None if found is None or expected is None else float(np.mean((found == expected).all(axis=1)))

    reference_record = records.measured(REFERENCE)
    table = records.tabulate(
        f"{MIX}: {len(texts):,} texts",
        {
            "texts/s": lambda _, record: NUMBER(record.rate(len(texts))),
            "tokens/s": lambda _, record: NUMBER(record.rate(record.passes[-1].num_tokens).median),
            "to the reference's way": lambda _, record: (
                RATIO(record.speed_against(reference_record)) if reference_record else ""
            ),
            "padding": lambda _, record: SHARE(record.passes[-1].padding_waste),
            "peak memory": lambda _, record: MEBIBYTES(record.model_peak_bytes),
            "as the reference's": lambda _, record: SHARE(share_of_equal(record) or 0.0),
            "published, texts/s": lambda key, _: f"{PUBLISHED.get(key, '')}",
        },
    )
    measures: list[Measure] = []
    if ratio := records.speed(ENGINE, REFERENCE):
        measures.append(at_least("our engine, to the reference's way", ratio, 5.0, RATIO))
    if ratio := records.speed(ENGINE, ALONE):
        measures.append(told("our engine, to our network one at a time", ratio, RATIO))
    shares = [share for record in records.values() if (share := share_of_equal(record)) is not None]
    if shares:
        name = "texts with the very records of the reference's way, in the worst row"
        measures.append(at_least(name, min(shares), 1.0, SHARE))
    sizes = ", ".join(str(sum(1 for _ in list_types(schema))) for schema in SCHEMAS)
    shape = "a tiny shape" if harness.is_quick else "DeBERTa-base's shape"
    return Report(
        f"{len(texts):,} docstrings of {NUM_CHARS[0]} to {NUM_CHARS[1]:,} characters, schemas of {sizes} types, "
        f"{shape} with random weights, {harness.repeat} passes of each.",
        (table, tabulate(measures)),
        (
            "Every system except the single one uses both cores. Ratios are taken repetition by repetition. Memory is "
            "that of the processes that hold the model.",
            "The reference's method uses our prompts, windows and decoding, which tests compare with the reference's, "
            "and transformers' DeBERTa, which projects the relative positions again in every layer of every pass, with "
            "batches of one text. The second row is the same with our network.",
            "The weights are random, and records mean nothing: equal records show that batches, placements and jobs "
            "do not change them. Near 0 the sign of a logit may change with different arithmetic.",
            f"The published figures are for RexUniNLU on one GPU ({PUBLISHED[SINGLE]}) and on two, on another machine, "
            "so only the ratios can be compared.",
            *records.list_reasons(),
        ),
    )


def list_jobs(texts: list[str]) -> list[Any]:
    """Return the items and options of one job per schema; keys are the positions of the texts."""
    jobs: dict[int, list[Any]] = {}
    for place, tagged in enumerate(texts):
        number, text = split_tag(tagged)
        jobs.setdefault(number, []).append({"key": f"{place}", "text": text})
    return [
        (items, {"task": "extract", "extract_schema": json.dumps(SCHEMAS[number])})
        for number, items in jobs.items()
    ]


def read(client: Client, job_id: str) -> list[tuple[str, Any]]:
    """Return the records of a job's texts with their keys."""
    return [(each["key"], each["output"]) for each in client.records(job_id)]
