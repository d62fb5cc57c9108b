"""backends: our engine with openvino and with torch on the processor, for the table of worker/encoder/backends.py."""

import json
from pathlib import Path
from typing import Final

from benchmarks.mixes import PARAGRAPHS, QUERIES, Mix, make_mix
from benchmarks.models.random_weights import write_random_model
from benchmarks.models.shapes import SHAPES
from benchmarks.order import Order
from benchmarks.probes.machine import benchmark_device
from benchmarks.results.report import Report
from benchmarks.results.table import Table
from benchmarks.results.writing import write_number, write_ratio
from benchmarks.systems.child import ChildSystem
from benchmarks.systems.protocol import ChildOrder
from benchmarks.systems.system import System
from benchmarks.systems.turns import Record, Turns
from vectormill.cli.workplace import workplace
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.settings import process_environment
from worker.devices.device import device_environment
from worker.encoder.backends import BACKENDS
from worker.encoder.choice import BF16, FP32, INT8

PACKAGED: Final = "all-MiniLM-L6-v2"
RANDOM: Final = ("bert-base",)
# Texts of a pass by model, of short ones and of paragraphs.
NUM_TEXTS: Final = {PACKAGED: {QUERIES: 4000, PARAGRAPHS: 600}, "bert-base": {QUERIES: 800, PARAGRAPHS: 100}}
PREFERRED: Final = next(iter(BACKENDS))


def measure(order: Order) -> Report:
    device = benchmark_device()
    precisions = (FP32, *((BF16,) if device.has_bf16 else ()), INT8)
    models = (PACKAGED, *RANDOM)
    steps = len(models) * len(precisions) * Turns.count_steps(len(BACKENDS), 2, order.repeat)
    order.steps.begin("backends", steps)
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    with workplace(None) as directory:
        for model in models:
            mixes = [
                make_mix(name, order.items or num_texts, Path())
                for name, num_texts in NUM_TEXTS[model].items()
            ]
            path = find_model(model, directory)
            for precision in precisions:
                systems = {name: start(name, precision, path, mixes, directory) for name in BACKENDS}
                with Turns(systems, order.steps.step) as turns:
                    for mix in mixes:
                        records = turns.run(mix.name, order.repeat)
                        rows.append((model, precision, mix.name, *describe(records)))
                        notes += [f"{each.name}: {each.failure}" for each in records.values() if each.failure]
    return Report(
        "backends",
        f"our engine on {device.num_threads} cores with each backend in turn, {order.repeat} passes of each.",
        (
            Table(
                (
                    "model",
                    "precision",
                    "texts",
                    *(f"{name}, tokens/s" for name in BACKENDS),
                    f"{PREFERRED} to the other",
                    *(f"{name}, MiB at the peak" for name in BACKENDS),
                ),
                tuple(rows),
            ),
        ),
        (
            "bert-base has random weights. The ratio is taken pass by pass; the peak is of the model process.",
            *notes,
        ),
    )


def find_model(name: str, directory: Path) -> Path:
    packaged = Registry({}).card(DEFAULT_MODEL, weights=True).path
    return packaged if name == PACKAGED else write_random_model(SHAPES[name], packaged, directory / name)


def start(backend: str, precision: str, model: Path, mixes: list[Mix], directory: Path) -> System:
    texts = directory / "texts.json"
    texts.write_text(json.dumps({mix.name: mix.texts for mix in mixes}), encoding="utf-8")
    order = ChildOrder(
        str(model), str(texts), str(directory / f"{backend}.npy"), str(directory / "cache"), "cpu"
    )
    environment = (
        process_environment()
        | device_environment(benchmark_device())
        | {"VECTORMILL_WORKER_BACKEND": backend, "VECTORMILL_WORKER_PRECISION": precision}
    )
    return ChildSystem(f"{backend}, {precision}", "benchmarks.systems.engine_alone", order, environment)


def describe(records: dict[str, Record]) -> tuple[str, ...]:
    """Rates, the ratio, and peaks; dashes where one of them was not measured."""
    sound = all(record.passes for record in records.values())
    other = next(name for name in BACKENDS if name != PREFERRED)
    rates = (
        record.rate(record.passes[0].num_tokens).describe(write_number) if record.passes else "–"
        for record in records.values()
    )
    ratio = records[PREFERRED].speed_against(records[other]).describe(write_ratio) if sound else "–"
    return (*rates, ratio, *(f"{record.model_peak_bytes / 2**20:,.0f}" for record in records.values()))
