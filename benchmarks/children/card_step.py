"""A step of the benchmark `card`, in a process of its own: it prints a line of JSON for each thing that it measured.

So a step that hangs, crashes or outlasts its share of the time loses nothing that was printed before.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.children.serving import ChildOrder
from benchmarks.harness import ROOT
from benchmarks.machine import find_device, measure_copy, measure_product
from benchmarks.models import NOT_MULTIPLIED, ModelCost, find_random, read_shapes
from benchmarks.ours import ENGINE_MODULE, MODEL
from benchmarks.peers import SENTENCE_TRANSFORMER
from benchmarks.placed import PlacedModel, check_switches, draw, plan_replica
from benchmarks.questions.feeders import name_devices
from benchmarks.questions.host import Bench
from benchmarks.questions.scale import write_texts
from benchmarks.texts import ExactTexts
from benchmarks.turns import Child
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.models.weights import find_weights
from vectormill.settings import process_environment
from worker.devices.device import CPU
from worker.encoder.choice import FP32, PACKED, choose_precision
from worker.encoder.encoder import AUTO
from worker.placement.strategies import REPLICATE
from worker.runner.starter import Sharing

Row = Mapping[str, Any]
# What a step is told: `device`, `shape`, `lengths`, `batch_tokens`, `seconds` of a pass, and what only it needs.
Order = Mapping[str, Any]

PASSES: Final = 3


def measure_ceilings(order: Order) -> Iterator[Row]:
    """Yield the device's rate of copying, of one large product, and of the products of each shape's layers."""
    import torch

    kind = find_device(order["device"]).kind
    precision = torch.float32 if kind == CPU else torch.bfloat16
    yield {"name": "copy", "gb_per_second": measure_copy(kind, order["copied_bytes"])}
    size = order["size"]
    yield {"name": "product", "tflops": measure_product(kind, precision, (size, size, size), 0.5) / 1e3}
    for shape in order["shapes"]:
        card = find_random(shape)
        matrices = Counter(
            tuple(found)
            for path in find_weights(card.path, card.name)
            for name, found in read_shapes(path).items()
            if len(found) == 2 and not any(part in name for part in NOT_MULTIPLIED)
        )
        flop = seconds = 0.0
        for (outputs, inputs), count in matrices.items():
            rate = measure_product(kind, precision, (order["batch_tokens"], inputs, outputs), 0.2)
            flop += 2.0 * outputs * inputs * count
            seconds += 2.0 * outputs * inputs * count / rate
        yield {"name": shape, "tflops": flop / seconds / 1e3}


def measure_model(order: Order) -> Iterator[Row]:
    """Yield tokens/s of a model in the process that a worker starts, by way of computing and length of texts."""
    device, card = find_device(order["device"]), find_random(order["shape"])
    precision = FP32 if device.kind == CPU else choose_precision(AUTO, device).value
    replica = plan_replica(card, (device,), precision, REPLICATE, 128, order["batch_tokens"])
    cost = ModelCost.of(card)
    for way, switches in order["ways"].items():
        began = time.perf_counter()
        attention = PACKED if device.kind == CPU else AUTO
        with PlacedModel(Sharing(replica, (device,)), card, precision, attention, switches) as placed:
            check_switches(placed, switches)
            load_seconds = time.perf_counter() - began
            for length in order["lengths"]:
                ids = draw(4 * order["batch_tokens"] // length, (length, length))
                flop = cost.count_flop(np.full(len(ids), length))
                placed.encode(ids, order["batch_tokens"])
                passes: list[float] = []
                while sum(passes) < order["seconds"] or len(passes) < PASSES:
                    passes.append(placed.encode(ids, order["batch_tokens"]).seconds)
                best = sorted(passes)[len(passes) // 2]
                yield {
                    "shape": order["shape"], "way": way, "length": length, "load_seconds": load_seconds,
                    "tokens_per_second": len(ids) * length / best, "tflops": flop / best / 1e12,
                    "attention": placed.loaded.attention, "peak_bytes": placed.readings()[0].peak_bytes,
                    **placed.profile(ids, order["batch_tokens"]),
                }  # fmt: skip


def compare_with_peer(order: Order) -> Iterator[Row]:
    """Yield tokens/s of sentence-transformers and of our engine, each with its tokenizer, on the same texts."""
    device, card = find_device(order["device"]), find_random(order["shape"])
    precision = FP32 if device.kind == CPU else choose_precision(AUTO, device).value
    texts = ExactTexts(card.path)
    with TemporaryDirectory(prefix="vectormill-card-") as place:
        directory = Path(place)
        mixes = {
            str(length): texts.draw(length, order["num_tokens"] // length) for length in order["lengths"]
        }
        (directory / "texts.json").write_text(json.dumps(mixes), encoding="utf-8")
        options = {"precision": precision, "attention": "best", "batch_size": "256"}
        systems = {
            "sentence-transformers": (SENTENCE_TRANSFORMER, options),
            "engine": (ENGINE_MODULE, {"precision": precision}),
        }
        for name, (module, own) in systems.items():
            child = ChildOrder(
                str(card.path), str(directory / "texts.json"), str(directory / f"{name}.npy"), place,
                order["device"], own,
            )  # fmt: skip
            with Child(name, module, child, process_environment()) as system:
                for mix in mixes:
                    system.warm_up(mix)
                    done = min((system.encode(mix) for _ in range(2)), key=lambda each: each.seconds)
                    yield {
                        "shape": order["shape"], "system": name, "length": int(mix),
                        "tokens_per_second": done.num_tokens / done.seconds, **asdict(done),
                    }  # fmt: skip


def serve_jobs(order: Order) -> Iterator[Row]:
    """Yield tokens/s that a whole service commits, by its number of workers, to Parquet or to Postgres."""
    card, length, count = find_random(order["shape"]), order["length"], order["num_texts"]
    with workplace(None) as directory:
        folder = directory / "objects"
        folder.mkdir()
        source = folder / "texts.parquet"
        write_texts(source, ExactTexts(card.path).draw(length, count))
        for num_workers in order["workers"]:
            variables = {
                "VECTORMILL_SOURCE_ROOT": str(folder),
                "VECTORMILL_OUTPUT_ROOT": str(folder),
                "VECTORMILL_WORKER_DEVICES": name_devices(order["device"], num_workers),
            }
            place = directory / f"workers-{num_workers}"
            with Bench(ROOT, place, card, variables, is_null=False) as bench:
                is_parquet = order["target"] == "Parquet"
                to: dict[str, Any] = (
                    {"to": f"file://{folder}/out-{num_workers}"} if is_parquet else {"collection": "card"}
                )
                found = bench.measure(
                    partial(
                        Client.submit_objects,
                        urls=f"file://{source}",
                        text="body",
                        key="id",
                        model=MODEL,
                        **to,
                    )
                )
                yield {
                    "shape": order["shape"], "workers": num_workers, "target": order["target"], "length": length,
                    "tokens_per_second": count * length / found["seconds"],
                }  # fmt: skip


STEPS: Final[Mapping[str, Callable[[Order], Iterator[Row]]]] = {
    "ceilings": measure_ceilings,
    "model": measure_model,
    "peer": compare_with_peer,
    "service": serve_jobs,
}

if __name__ == "__main__":
    for row in STEPS[sys.argv[1]](json.loads(sys.argv[2])):
        print(json.dumps(row), flush=True)
