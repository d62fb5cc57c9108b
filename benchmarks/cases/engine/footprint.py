"""footprint: the memory that a plan foresees for a model, and what its processes take that really run it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.cases.engine.shapes import find_device
from benchmarks.models.random_weights import write_random_model
from benchmarks.models.shapes import SHAPES
from benchmarks.order import CPU, BenchmarkFailed, Order
from benchmarks.results.report import Report
from benchmarks.results.table import Table, judge
from benchmarks.results.writing import write_mebibytes, write_share
from benchmarks.systems.placed import Ids, PlacedModel, Way
from vectormill.cli.stack import workplace
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.detect import detect_inventory
from worker.devices.device import Device, parse_devices
from worker.encoder.choice import BF16, FP32
from worker.parallel.layouts import find_layout
from worker.placement.placement import Replica
from worker.placement.replicas import Needs, ReplicaBuilder
from worker.placement.sizes.footprint import SCRATCH_BYTES
from worker.placement.sizes.model_shape import read_model_shape
from worker.placement.sizes.room import GIB, Room
from worker.placement.strategies import REPLICATE, SHARED, TENSOR
from worker.runner.starter import Sharing

# Random weights in the shapes of all-MiniLM-L6-v2, BERT-base and BERT-large: 22, 110 and 335 million parameters.
MODELS: Final = ("minilm", "bert-base", "bert-large")
STRATEGIES: Final = (REPLICATE, *SHARED)
TEXTS: Final = "texts"
LENGTH: Final = 128
# What a device computes at a time.
TOKENS: Final = {CPU: 1024, "cuda": 32_768}
NUM_RANKS: Final = 2
TOLERANCE: Final = 0.15
ATTENTION: Final = "padded (sdpa)"
# An allocator that gives memory back at once: by default glibc keeps up to a third of the peak for itself.
GIVING_BACK: Final = {"MALLOC_MMAP_THRESHOLD_": "65536"}
HEADER: Final = (
    "model", "weights, foreseen", "measured", "batch, foreseen", "measured", "peak, foreseen", "measured", "off by",
    "target",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """One rank's bytes, foreseen and found."""

    name: str
    weight_bytes: int
    batch_bytes: int
    found_weight_bytes: int
    found_batch_bytes: int

    @property
    def error(self) -> float:
        """Of the peak; negative where more was taken than foreseen."""
        found = self.found_weight_bytes + self.found_batch_bytes
        return (self.weight_bytes + self.batch_bytes) / found - 1

    def row(self) -> tuple[str, ...]:
        foreseen, found = (
            self.weight_bytes + self.batch_bytes,
            self.found_weight_bytes + self.found_batch_bytes,
        )
        return (
            self.name,
            *(write_mebibytes(size) for size in (self.weight_bytes, self.found_weight_bytes)),
            *(write_mebibytes(size) for size in (self.batch_bytes, self.found_batch_bytes)),
            *(write_mebibytes(size) for size in (foreseen, found)),
            f"{self.error:+.1%}",
            judge(f"± {TOLERANCE:.0%}", abs(self.error) <= TOLERANCE),
        )


def measure(order: Order) -> Report:
    device = find_device(order.device)
    names = order.shapes or MODELS
    strategies = list_strategies(device)
    order.steps.begin("footprint", len(names) * (1 + len(strategies)))
    predictions: list[Prediction] = []
    for name in names:
        with workplace(None) as directory:
            order.steps.step(f"{name}: writing random weights")
            card = make_card(name, directory)
            for strategy in strategies:
                order.steps.step(f"{name}: {strategy}")
                if strategy == TENSOR and find_layout(SHAPES[name].model_type).tensor_obstacle:
                    continue
                predictions += measure_strategy(card, device.kind, strategy)
    return make_report(order, device, predictions)


def list_strategies(device: Device) -> tuple[str, ...]:
    """Those that the machine has devices for."""
    inventory = detect_inventory()
    if device.kind == CPU:
        return STRATEGIES if len(inventory.physical_cores) >= NUM_RANKS else STRATEGIES[:1]
    there = [each for each in inventory.accelerators if each.kind == device.kind]
    return STRATEGIES if len(there) >= NUM_RANKS else STRATEGIES[:1]


def make_card(name: str, directory: Path) -> ModelCard:
    tokenizer = Registry({}).card(DEFAULT_MODEL).path
    return read_model_card(name, write_random_model(SHAPES[name], tokenizer, directory / "models" / name))


def measure_strategy(card: ModelCard, kind: str, strategy: str) -> Iterator[Prediction]:
    """A batch of exactly the size that the plan allows, and the memory of every rank before, loaded and at most."""
    names = (
        CPU if strategy == REPLICATE and kind == CPU else ",".join(f"{kind}:{n}" for n in range(NUM_RANKS))
    )
    inventory = detect_inventory()
    devices = parse_devices(names, inventory)
    devices = devices[:1] if strategy == REPLICATE else devices
    precision = BF16 if kind != CPU and devices[0].has_bf16 else FP32
    replica = plan_replica(card, devices, precision, strategy)
    way = Way(strategy, (Sharing(replica, tuple(devices)),), replica.max_batch_tokens)
    texts = make_texts(replica.max_batch_tokens)
    with PlacedModel(way, card, precision, {TEXTS: texts}, GIVING_BACK) as system:
        system.warm_up(TEXTS)  # what a kernel makes once for all is foreseen with every batch
        system.encode(TEXTS)
        readings = system.readings()
    shards = [shard for stage in replica.stages for shard in stage.shards]
    for number, (shard, reading) in enumerate(zip(shards, readings, strict=True)):
        alone = strategy == REPLICATE
        yield Prediction(
            f"{card.name}, {'single' if alone else f'{strategy}, rank {number}'}".replace("_", " "),
            shard.weight_bytes,
            shard.activation_bytes + SCRATCH_BYTES,
            reading.loaded_bytes - reading.before_bytes,
            reading.peak_bytes - reading.loaded_bytes,
        )


def plan_replica(card: ModelCard, devices: Sequence[Device], precision: str, strategy: str) -> Replica:
    """The planner's own, on devices with more than enough room and batches of one size."""
    tokens = TOKENS[devices[0].kind]
    needs = Needs(precision, precision, ATTENTION, LENGTH, tokens)
    rooms = [Room(device.name, device.kind, 1024 * GIB, 1e12) for device in devices]
    built = ReplicaBuilder(read_model_shape(card), needs).build(strategy, rooms, "pcie")
    if not isinstance(built, Replica):
        raise BenchmarkFailed(built.reason)
    return built


def make_texts(num_tokens: int) -> Ids:
    """Of one length, but for every eighth: so there is padding, and with it a mask."""
    return [
        np.arange(1000, 1000 + LENGTH - (place % 8 == 7), dtype=np.int32)
        for place in range(num_tokens // LENGTH)
    ]


def make_report(order: Order, device: Device, predictions: Sequence[Prediction]) -> Report:
    what = (
        "Measured is resident memory: with every library imported, with the model loaded, and at most while a batch is "
        "encoded. The allocator gives memory back at once (MALLOC_MMAP_THRESHOLD_=65536)."
        if device.kind == CPU
        else "Measured is what torch's allocator has handed out: with the model loaded, and at most."
    )
    worst = max(abs(prediction.error) for prediction in predictions)
    return Report(
        "footprint",
        f"predicted against measured memory of random weights on {device.description or device.name}.",
        (Table(HEADER, tuple(prediction.row() for prediction in predictions)),),
        (
            f"{what} A device computes {TOKENS[device.kind]:,} tokens at a time, in texts of {LENGTH}.",
            f"Foreseen is what the planner counts for each rank, and {write_mebibytes(SCRATCH_BYTES)} for the kernels. "
            f"The worst row is off by {write_share(worst)}.",
        ),
    )
