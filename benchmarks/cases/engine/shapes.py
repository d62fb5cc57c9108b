"""shapes: `engine` for a GPU. Models of random weights, in the shape of known ones, on texts of mixed lengths.

Systems run one after the other, each alone on the device, so that its memory is its own. On the processor the same runs
with small shapes, which shows that everything but the device works.
"""

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

from benchmarks.cases.comparing import compare, count_tokens, list_reasons
from benchmarks.mixes import Mix, list_documents, list_paragraphs, list_queries, number_copies
from benchmarks.models.random_weights import write_random_model
from benchmarks.models.shapes import GPU_SHAPES, SHAPES, Shape
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.peers.catalogue import GPU_PEERS, PEERS, Peer
from benchmarks.probes.machine import benchmark_device
from benchmarks.probes.matrix_rate import measure_matrix_rates
from benchmarks.probes.peak import PeakSampler
from benchmarks.results.comparison import Comparison
from benchmarks.results.report import Report
from benchmarks.results.table import Measure, tabulate
from benchmarks.results.writing import write_number, write_ratio, write_seconds, write_share
from benchmarks.systems.line_up import ENGINE, OURS, LineUp
from benchmarks.systems.turns import Record, Turns
from vectormill.cli.stack import workplace
from vectormill.corpus import take_evenly
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.detect import DeviceSampler, detect_inventory
from worker.devices.device import CPU, CUDA, Device

MIXED: Final = "mixed lengths"
NUM_PARAGRAPHS: Final = 2400
NUM_QUERIES: Final = 2400
NUM_DOCUMENTS: Final = 300
MEMORY_PAUSE_SECONDS: Final = 0.2
PEER_TARGET: Final = 2.0
# Share of the matrix rate, by the model's type.
LIMIT_TARGETS: Final[Mapping[str, float]] = {"bert": 0.55, "qwen3": 0.50}


def measure(order: Order) -> Report:
    device = find_device(order.device)
    shapes = [SHAPES[name] for name in order.shapes or GPU_SHAPES]
    peers = GPU_PEERS if device.kind == CUDA else PEERS[:1]
    known = (*OURS, *(peer.name for peer in peers))
    num_systems = sum(name in (order.systems or known) for name in known)
    if not num_systems:
        raise BenchmarkFailed(f"On {device.kind} there are the systems {', '.join(known)}.")
    order.steps.begin("engine", 2 + len(shapes) * (1 + Turns.count_steps(num_systems, 1, order.repeat)))
    order.steps.step("measuring what the device can do")
    limits = measure_matrix_rates(device)
    order.steps.step("collecting texts")
    texts = list_mixed()
    comparisons = [measure_shape(order, shape, device, peers, texts, limits) for shape in shapes]
    return make_report(order, device, shapes, comparisons)


def find_device(name: str) -> Device:
    """`cuda` is the first GPU. Raises BenchmarkFailed with what is there."""
    if name == CPU:
        return benchmark_device()
    there = [device for device in detect_inventory().accelerators if device.kind == CUDA]
    for device in there:
        if name in (CUDA, device.name):
            return device
    names = ", ".join(device.name for device in there) or "no GPU that the driver names"
    raise BenchmarkFailed(f"There is no device {name!r} here; there is cpu, and {names}.")


def measure_shape(
    order: Order,
    shape: Shape,
    device: Device,
    peers: Sequence[Peer],
    texts: Sequence[str],
    limits: Mapping[str, float],
) -> Comparison:
    """In a directory of its own: a large model's files are gone before the next one's are written."""
    with workplace(None) as directory:
        order.steps.step(f"writing random weights of the shape {shape.name}")
        tokenizer = Registry({}).card(DEFAULT_MODEL).path
        model = write_random_model(shape, tokenizer, directory / "models" / shape.name)
        card = read_model_card(shape.name, model)
        mix = make_mixed(shape, card, texts, order.items)
        line_up = LineUp(directory, model, [mix], device)
        records: dict[str, Record] = {}
        for name, system in line_up.make(order.systems, peers).items():
            read = partial(read_device_bytes, DeviceSampler(device, lambda: None))
            with (
                # Nothing else may use the device meanwhile.
                PeakSampler(read, MEMORY_PAUSE_SECONDS) if device.kind == CUDA else nullcontext() as memory,
                Turns({name: system}, order.steps.step) as turns,
            ):
                records[name] = turns.run(mix.name, order.repeat)[name]
            if memory is not None:
                records[name].whole_peak_bytes = memory.growth_bytes
        return compare(mix, card, records, limits, peers[0].name)


def read_device_bytes(sampler: DeviceSampler) -> int:
    """Memory in use of a GPU; 0 when the driver does not answer."""
    return sampler.sample().memory_used_bytes or 0


def list_mixed() -> list[str]:
    """Paragraphs, queries and documents, by tokens a half, a tenth and the rest; in one order for all time."""
    texts = [*list_paragraphs(NUM_PARAGRAPHS), *list_queries(NUM_QUERIES), *list_documents(NUM_DOCUMENTS)]
    random.Random(0).shuffle(texts)
    return texts


def make_mixed(shape: Shape, card: ModelCard, texts: Sequence[str], num_texts: int | None) -> Mix:
    """So many of the texts, or as many (in several rounds if need be) as have the shape's number of tokens."""
    share = shape.num_tokens / int(count_tokens(card, texts).sum())
    count = math.ceil(share * len(texts)) if num_texts is None else num_texts
    rounds = number_copies(texts, math.ceil(count / len(texts)))
    return Mix(
        f"{shape.name}, {MIXED}", "queries, paragraphs and documents", tuple(take_evenly(rounds, count))
    )


def make_report(
    order: Order, device: Device, shapes: Sequence[Shape], comparisons: Sequence[Comparison]
) -> Report:
    rates = ", ".join(f"{name} {write_number(rate)} GFLOP/s" for name, rate in comparisons[0].limits.items())
    measures = [
        measure for shape, each in zip(shapes, comparisons, strict=True) for measure in judge(shape, each)
    ]
    memory = (
        "Memory is the device's, at its peak: nothing else uses it." if device.kind == CUDA else
        "Memory is resident, at its peak."
    )  # fmt: skip
    return Report(
        "engine",
        f"random weights on {device.description or device.name}, {order.repeat} passes of each.",
        (*(each.to_table() for each in comparisons), tabulate(measures)),
        (
            f"The matrix rate of the device: {rates}. The share of the limit is that of the system's precision; "
            "attention is counted whole, for decoders too.",
            "Median of all passes, smallest and largest in brackets. Systems run one after the other, each alone.",
            f"The peer, and what cosines are to, is {comparisons[0].peer_name()}. {memory}",
            *(
                f"{shape.name}: {sentence}"
                for shape, each in zip(shapes, comparisons, strict=True)
                for sentence in describe_engine(each)
            ),
            *list_reasons(comparisons),
        ),
    )


def judge(shape: Shape, comparison: Comparison) -> list[Measure]:
    """Our engine against the matrix rate, and against the faster of the peers."""
    measures = []
    share, engine = comparison.limit_share(ENGINE), comparison.measured(ENGINE)
    if share is not None:
        target = LIMIT_TARGETS.get(shape.model_type)
        name, value = f"{shape.name}: our engine, of the matrix rate", write_share(share)
        measures.append(
            Measure(name, value)
            if target is None
            else Measure(name, value, f"≥ {target:.0%}", share >= target)
        )
    rivals = [
        record for name in comparison.records if name not in OURS and (record := comparison.measured(name))
    ]
    if engine and rivals:
        rival = max(rivals, key=lambda record: record.rate(1).median)
        ratio = engine.speed_against(rival)
        name = f"{shape.name}: our engine, to {rival.name}"
        is_met = ratio.median >= PEER_TARGET
        measures.append(Measure(name, ratio.describe(write_ratio), f"≥ {PEER_TARGET:g}×", is_met))
    return measures


def describe_engine(comparison: Comparison) -> list[str]:
    """What our engine chose and why, and how long each stage was at work in the last pass."""
    record = comparison.measured(ENGINE)
    if record is None:
        return []
    choices = [
        f"{name} {value['value']} ({value['reason']})"
        for name, value in record.report.items()
        if isinstance(value, Mapping) and value.keys() >= {"value", "reason"}
    ]
    stages: Mapping[str, Any] = record.report.get("pass_stage_seconds", {})
    busy = ", ".join(f"{name} {write_seconds(seconds)}" for name, seconds in stages.items())
    last = write_seconds(record.passes[-1].seconds)
    return [
        f"our engine: {'; '.join(choices)}." if choices else "our engine says nothing of its choices.",
        f"at work in the last pass of {last}: {busy}. Other stages than run have several threads.",
    ]
