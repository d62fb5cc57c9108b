"""feeders: the texts per second of one device when several workers feed it.

With `--device cuda` a GPU encodes the texts. Otherwise a device that takes no time does, and each worker has its
share of the cores, so that only the host is measured.
"""

import os
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import ROOT, Harness
from benchmarks.machine import find_device
from benchmarks.models import find_packaged, find_random
from benchmarks.ours import MODEL
from benchmarks.processes import CELERY_WORKER, MODEL_PROCESS
from benchmarks.questions.host import OTHERS, Bench, choose_sizes, count_seconds
from benchmarks.questions.scale import write_texts
from benchmarks.tables import NUMBER, RATIO, SHARE, Report, Spread, Table
from benchmarks.texts import ExactTexts
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.jobs.bottleneck import STAGES
from vectormill.models.model_card import ModelCard
from worker.devices.device import CPU

NUM_WORKERS: Final = (1, 2, 4, 8)

Passes = dict[tuple[int, int], list[dict[str, Any]]]


def run(harness: Harness) -> Report:
    device = find_device(harness.device)
    num_cores = len(os.sched_getaffinity(0))
    sizes = choose_sizes(harness.items)
    workers = [
        count for count in NUM_WORKERS if count == 1 or count <= num_cores // (2 - (device.kind == CPU))
    ]
    packaged = find_packaged()
    cards = [find_random(shape) for shape in harness.shapes] or [packaged]
    tables = []
    with workplace(None) as directory:
        folder = directory / "objects"
        folder.mkdir()
        texts = ExactTexts(packaged.path)
        for tokens, count in sizes.items():
            harness.say(f"writing {count:,} texts of {tokens} tokens")
            write_texts(folder / f"{tokens}.parquet", texts.draw(tokens, count))
        for card in cards:
            passes: Passes = {}
            for number in workers:
                place = directory / f"{card.name.rpartition('/')[2]}-{number}"
                measure_workers(harness, card, place, folder, number, sizes, passes)
            tables += make_tables(card, sizes, passes)
    named = device.description if device.kind != CPU else "a device that takes no time"
    return Report(
        f"{named}, {num_cores} cores; from Parquet to Parquet, {harness.repeat} passes of each.",
        tuple(tables),
        (
            "Texts per second from the first chunk's claim to the last commit. Seconds of stages are those of threads, "
            "some of which wait for the interpreter lock or for the device.",
        ),
    )


def measure_workers(
    harness: Harness,
    card: ModelCard,
    directory: Path,
    folder: Path,
    num_workers: int,
    sizes: Mapping[int, int],
    passes: Passes,
) -> None:
    """Run a job of each length by this many workers on a stack of their own, and add what was measured."""
    variables = {
        "VECTORMILL_SOURCE_ROOT": str(folder),
        "VECTORMILL_OUTPUT_ROOT": str(folder),
        "VECTORMILL_WORKER_DEVICES": name_devices(harness.device, num_workers),
    }
    harness.say(f"{card.name}: starting {num_workers} workers")
    with Bench(ROOT, directory, card, variables, is_null=harness.device == CPU) as bench:
        for tokens, count in sizes.items():
            for number in range(harness.repeat):
                target = f"file://{folder}/{directory.name}-{tokens}-{number}"
                found = bench.measure(
                    partial(
                        Client.submit_objects,
                        urls=f"file://{folder}/{tokens}.parquet",
                        text="body",
                        key="id",
                        model=MODEL,
                        to=target,
                    )
                )
                passes.setdefault((tokens, num_workers), []).append(found)
                harness.say(
                    f"{tokens} tokens, {num_workers} workers: {count / found['seconds']:,.0f} texts/s"
                )


def name_devices(device: str, num_workers: int) -> str:
    if device == CPU:
        return ",".join(f"cpu:{number}" for number in range(num_workers))
    if ":" not in device:
        device = f"{device}:0"
    return device if num_workers == 1 else f"{device}*{num_workers}"


def make_tables(card: ModelCard, sizes: Mapping[int, int], passes: Passes) -> list[Table]:
    def rates(tokens: int, workers: int) -> list[float]:
        return [sizes[tokens] / each["seconds"] for each in passes[tokens, workers]]

    def micros(tokens: int, workers: int, read: Any) -> str:
        values = [read(each) for each in passes[tokens, workers]]
        return NUMBER(1e6 * statistics.median(values) / sizes[tokens])

    rows, stages = [], []
    for tokens, workers in passes:
        place = (tokens, workers)
        slope = Spread.of_ratios(rates(*place), rates(tokens, 1))
        spent = {
            name: micros(*place, lambda each, name=name: count_seconds(each["cpu"], name))
            for name in (CELERY_WORKER, MODEL_PROCESS, "postgres", OTHERS)
        }
        seconds = [each["seconds"] * len(os.sched_getaffinity(0)) for each in passes[place]]
        busy = statistics.median(
            each["busy"] / whole for each, whole in zip(passes[place], seconds, strict=True)
        )
        named = f"{tokens} tokens, {workers} workers"
        rows.append((named, NUMBER(Spread.of(rates(*place))), RATIO(slope), *spent.values(), SHARE(busy)))
        stages.append(
            (
                named,
                *(
                    micros(*place, lambda each, stage=stage: each["stages"].get(stage, 0.0))
                    for stage in STAGES
                ),
            )
        )
    heads = (
        card.name,
        "texts/s",
        "to one worker",
        "µs a text: worker",
        "model",
        "Postgres",
        "others",
        "cores busy",
    )
    return [Table(heads, tuple(rows)), Table((f"{card.name}, µs a text", *STAGES), tuple(stages))]
