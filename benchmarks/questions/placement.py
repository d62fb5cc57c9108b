"""placement: what each strategy reaches and takes, beside what the planner predicts of it.

All GPUs, or two halves of the processor. Rates are relative to one of these devices with the whole model, passes of
one strategy after those of another in turns. On a processor resident memory is measured, of which a part of what
libraries map counts or not (benchmarks.children.gauged).
"""

from typing import Final

import numpy as np

from benchmarks.harness import BenchmarkFailed, Harness
from benchmarks.models import find_packaged
from benchmarks.placed import Ids, PlacedModel, plan_replica
from benchmarks.tables import MEBIBYTES, Report, Spread, Table
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, CUDA, Device, parse_devices
from worker.encoder.choice import FP32, choose_precision
from worker.encoder.encoder import AUTO
from worker.placement.placement import Replica
from worker.placement.strategies import REPLICATE, SHARED
from worker.runner.starter import Sharing

NUM_TEXTS: Final = 256
LENGTH: Final = 128
# Tokens of a batch on one device: a processor's and a GPU's, with several batches in each pass.
BATCH_TOKENS: Final = {CPU: 2048, CUDA: 32_768}


def run(harness: Harness) -> Report:
    devices = find_devices()
    kind = devices[0].kind
    tokens = BATCH_TOKENS[kind]
    card = find_packaged()
    precision = FP32 if kind == CPU else choose_precision(AUTO, devices[0]).value
    ids = draw((harness.items or NUM_TEXTS) if kind == CPU else 64 * tokens // LENGTH)
    # A processor keeps what it has freed; with this threshold it gives it back, so that what is measured is in use.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"} if kind == CPU else {}
    replicas = {REPLICATE: plan_replica(card, devices[:1], precision, REPLICATE, LENGTH, tokens)}
    for strategy in SHARED:
        try:
            replicas[strategy] = plan_replica(card, devices, precision, strategy, LENGTH, tokens)
        except BenchmarkFailed as refused:
            harness.say(f"{strategy} is left out: {refused}")
    rates: dict[str, list[float]] = {strategy: [] for strategy in replicas}
    peaks: dict[str, list[int]] = {}
    for number in range(harness.repeat):
        for strategy, replica in replicas.items():
            harness.say(f"{strategy}, {number + 1} of {harness.repeat}")
            used = devices[: len(replica.devices)]
            with PlacedModel(Sharing(replica, used), card, precision, environment=environment) as system:
                system.encode(ids, replica.max_batch_tokens)  # the first pass is a warm-up
                done = system.encode(ids, replica.max_batch_tokens)
                rates[strategy].append(done.num_tokens / done.seconds)
                peaks[strategy] = [each.peak_bytes - each.before_bytes for each in system.readings()]
    unit = replicas[REPLICATE].relative_rate
    rows = [
        (
            strategy,
            f"{replica.relative_rate / unit:.2f}",
            f"{Spread.of_ratios(rates[strategy], rates[REPLICATE]).median:.2f}",
            " + ".join(MEBIBYTES(each) for each in predict(replica)),
            " + ".join(MEBIBYTES(each) for each in peaks[strategy]),
        )
        for strategy, replica in replicas.items()
    ]
    names = ", ".join(device.name for device in devices)
    header = ("strategy", "rate predicted", "measured", "memory predicted", "measured")
    return Report(
        f"{card.name} in {precision} on {names}: {len(ids):,} texts of {LENGTH} tokens, {harness.repeat} turns.",
        (Table(header, tuple(rows)),),
        ("Two processes that share one memory and its bandwidth say little about two cards.",)
        if kind == CPU
        else (),
    )


def find_devices() -> tuple[Device, ...]:
    """Return all GPUs if there are several, else two halves of the processor. Raise BenchmarkFailed without any."""
    inventory = detect_inventory()
    gpus = [device for device in inventory.accelerators if device.kind == CUDA]
    if len(gpus) > 1:
        return tuple(gpus)
    if len(inventory.physical_cores) < 2:
        raise BenchmarkFailed("Strategies need several GPUs, or a processor with two cores.")
    return tuple(parse_devices("cpu:0,cpu:1", inventory))


def predict(replica: Replica) -> list[int]:
    """Return the bytes that the plan counts on each device."""
    shards = [shard for stage in replica.stages for shard in stage.shards]
    return [shard.weight_bytes + shard.activation_bytes for shard in shards]


def draw(num_texts: int) -> Ids:
    """Return random token ids of so many texts. Every eighth is shorter, so that there is padding."""
    numbers = np.random.default_rng(0)
    return [
        numbers.integers(1000, 20_000, LENGTH - (place % 8 == 7)).astype(np.int32)
        for place in range(num_texts)
    ]
