"""placement: one model on two devices, held in every way there is, on the same batches of the same texts.

On a processor its two halves are the devices; one replica over both is a row of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.cases.engine.shapes import find_device
from benchmarks.mixes import number_copies
from benchmarks.models.random_weights import write_random_model
from benchmarks.models.shapes import SHAPES
from benchmarks.order import CPU, BenchmarkFailed, Order
from benchmarks.probes.closeness import Closeness
from benchmarks.results.report import Report
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import (
    write_cosine,
    write_mebibytes,
    write_number,
    write_ratio,
    write_share,
)
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.placed import Ids, PlacedModel, Way
from benchmarks.systems.system import System
from benchmarks.systems.turns import Record, Turns
from benchmarks.texts import list_docstrings
from vectormill.cli.stack import workplace
from vectormill.corpus import take_evenly
from vectormill.domain.errors import VectormillError
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.detect import detect_inventory
from worker.devices.device import Device, parse_devices, split_processor
from worker.encoder.choice import BF16, FP32
from worker.encoder.switches import PACKED_RANKS, QUEUED_RANKS
from worker.model.architectures import PACKABLE
from worker.parallel.layouts import find_layout
from worker.placement.sizes.model_shape import read_model_shape
from worker.placement.strategies import PIPELINE, REPLICATE, SHARED, STRATEGIES, TENSOR
from worker.plan import plan_worker
from worker.runner.starter import Sharing
from worker.settings import load_worker_settings
from worker.tokens.tokenizer import Tokenizer

TEXTS: Final = "docstrings"
NUM_DEVICES: Final = 2
PACKAGED: Final = "packaged"
DEBERTA: Final = "deberta-base"
MODELS: Final = (PACKAGED, DEBERTA)
# Seconds a pass on two cores, and on a large GPU; a model that is not named here has the second's.
NUM_TEXTS: Final[Mapping[str, Mapping[str, int]]] = {
    CPU: {PACKAGED: 600, DEBERTA: 160},
    "cuda": {PACKAGED: 120_000, DEBERTA: 40_000},
}
# Padded tokens that one device computes at a time: about sixteen paragraphs on a processor.
BATCH_TOKENS: Final[Mapping[str, int]] = {CPU: 1024, "cuda": 16_384}

SINGLE: Final = "single"
DATA_PARALLEL: Final = "data parallel"
WHOLE: Final = "one over all"
MODEL_PARALLEL: Final = "model parallel"
PIPELINED: Final = STRATEGIES[PIPELINE].title
TENSOR_PARALLEL: Final = STRATEGIES[TENSOR].title
STRATEGY_OF_WAY: Final[Mapping[str, str]] = {
    MODEL_PARALLEL: PIPELINE,
    **{STRATEGIES[name].title: name for name in SHARED},
}
# The same once more with the switches of ranks, on GPUs: a processor has neither a packed kernel nor a queue.
SWITCHED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    f"{STRATEGIES[name].title}, {' and '.join(switches)}": (STRATEGIES[name].title, switches)
    for name in SHARED
    for switches in ((QUEUED_RANKS,), (PACKED_RANKS, QUEUED_RANKS))
}
# In the order of the table.
WAYS: Final = (SINGLE, DATA_PARALLEL, WHOLE, *STRATEGY_OF_WAY, *SWITCHED)

REPLICAS_TARGET: Final = 0.9
BUBBLE_TOLERANCE: Final = 0.15
COSINE_TARGETS: Final[Mapping[str, float]] = {CPU: 0.99999, "cuda": 0.999}
# Texts per second, published for RexUniNLU, a DeBERTa base, on one and on two GPUs.
PUBLISHED: Final[Mapping[str, int]] = {SINGLE: 45, DATA_PARALLEL: 82, MODEL_PARALLEL: 78, PIPELINED: 88}
COLUMNS: Final = (
    "batch", "texts/s", "tokens/s", "utilisation", "to a single one", "peak memory", "min. cosine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placing:
    """What one model did in every way. `kind` is that of the devices."""

    model: str
    kind: str
    devices: tuple[Device, ...]
    num_texts: int
    num_tokens: int
    records: Mapping[str, Record]

    def measured(self, way: str) -> Record | None:
        record = self.records.get(way)
        return record if record is not None and record.passes and record.failure is None else None


def measure(order: Order) -> Report:
    kind = find_device(order.device).kind
    names = order.shapes or MODELS
    num_ways = len(list_ways(kind))
    order.steps.begin("placement", len(names) * (1 + Turns.count_steps(num_ways, 1, order.repeat)))
    return make_report(order, [measure_model(order, name, kind) for name in names])


def list_ways(kind: str) -> tuple[str, ...]:
    """One replica over two GPUs would be one of the shared ones."""
    return tuple(way for way in WAYS if (way not in SWITCHED if kind == CPU else way != WHOLE))


def measure_model(order: Order, name: str, kind: str) -> Placing:
    with workplace(None) as directory:
        order.steps.step(f"{name}: making the model and its batches")
        card = make_card(name, directory)
        count = order.items or NUM_TEXTS[kind].get(name, NUM_TEXTS[kind][DEBERTA])
        ids = tokenize(card, count)
        planner = WayPlanner(card, kind)
        systems = {way: planner.make(way, {TEXTS: ids}) for way in list_ways(kind)}
        with Turns(systems, lambda sentence: order.steps.step(f"{name}: {sentence}")) as turns:
            records = turns.run(TEXTS, order.repeat)
        num_tokens = sum(len(each) for each in ids)
        return Placing(card.name, kind, planner.devices, len(ids), num_tokens, records)


def make_card(name: str, directory: Path) -> ModelCard:
    """The packaged model, or one of random weights in that shape."""
    packaged = Registry({}).card(DEFAULT_MODEL, weights=True)
    if name == PACKAGED:
        return packaged
    return read_model_card(name, write_random_model(SHAPES[name], packaged.path, directory / "models" / name))


def tokenize(card: ModelCard, count: int) -> Ids:
    """Docstrings, again and again if need be; cut where the model ends."""
    docstrings = [item["text"] for item in list_docstrings()]
    texts = take_evenly(number_copies(docstrings, -(-count // len(docstrings))), count)
    tokenized = Tokenizer(card.path, lowercase=card.lowercase).tokenize(texts, card.max_tokens, truncate=True)
    return [tokenized.ids(number) for number in range(len(texts))]


class WayPlanner:
    """Has the planner make a placement of every way on two devices. Starts nothing."""

    def __init__(self, card: ModelCard, kind: str) -> None:
        self._card = card
        self._model_type = read_model_shape(card).model_type
        self._inventory = detect_inventory()
        self._kind = kind
        names = [f"{kind}:{number}" for number in range(NUM_DEVICES)]
        if kind != CPU:
            there = [device.name for device in self._inventory.accelerators if device.kind == kind]
            if len(there) < NUM_DEVICES:
                raise BenchmarkFailed(f"It needs {NUM_DEVICES} GPUs; there is {', '.join(there)}.")
            names = there[:NUM_DEVICES]
        self._names = ",".join(names)
        self.devices = tuple(parse_devices(self._names, self._inventory))
        self._precision = BF16 if kind != CPU and self.devices[0].has_bf16 else FP32

    def make(self, way: str, mixes: Mapping[str, Ids]) -> System:
        """A MissingSystem where the model cannot be held in that way."""
        title = self._title(way)
        plain, switches = SWITCHED.get(way, (way, ()))
        obstacle = find_layout(self._model_type).tensor_obstacle
        if plain == TENSOR_PARALLEL and obstacle:
            return MissingSystem(title, f"{obstacle}.")
        if PACKED_RANKS in switches and self._model_type not in PACKABLE:
            return MissingSystem(title, f"a {self._model_type} cannot be packed.")
        try:
            planned = self._plan(plain)
        except VectormillError as error:
            return MissingSystem(title, str(error))
        if QUEUED_RANKS in switches:
            planned = replace(planned, switches=switches, batches_ahead=planned.batches_ahead + 1)
        return PlacedModel(replace(planned, name=title), self._card, self._precision, mixes)

    def _plan(self, way: str) -> Way:
        tokens = BATCH_TOKENS[self._kind]
        if way == SINGLE:
            return Way(way, self._share(REPLICATE, self._names)[:1], tokens)
        if way == DATA_PARALLEL:
            return Way(way, self._share(REPLICATE, self._names), tokens)
        if way == WHOLE:
            return Way(way, self._share(REPLICATE, CPU), tokens)
        sharing = self._share(STRATEGY_OF_WAY[way], self._names)
        if way == MODEL_PARALLEL:
            # Layer by layer: one micro-batch, and nothing in flight but one batch. With two, their halves would be a
            # pipeline of two micro-batches.
            whole = tuple(replace(each, replica=replace(each.replica, micro_batches=1)) for each in sharing)
            return Way(way, whole, tokens, batches_ahead=1)
        # Those that divide a batch get one for each of their devices.
        return Way(way, sharing, tokens if way == TENSOR_PARALLEL else NUM_DEVICES * tokens)

    def _share(self, strategy: str, devices: str) -> tuple[Sharing, ...]:
        """The planner's own replicas, whose memory is no concern here."""
        settings = load_worker_settings(devices=devices, strategy=strategy, precision=self._precision)
        placement = plan_worker(self._card, self._inventory, settings)
        there = (
            split_processor(self._inventory, 1) if devices == CPU else parse_devices(devices, self._inventory)
        )
        known = {device.name: device for device in there}
        return tuple(
            Sharing(replica, tuple(known[name] for name in replica.devices)) for replica in placement.replicas
        )

    def _title(self, way: str) -> str:
        cores = "GPU" if self._kind != CPU else _count(self.devices[0].num_threads, "core")
        both = _count(sum(device.num_threads for device in self.devices), "core")
        return {
            SINGLE: f"single, {cores}" if self._kind == CPU else "single",
            DATA_PARALLEL: f"data parallel, two replicas of {cores}"
            if self._kind == CPU
            else "data parallel",
            WHOLE: f"one replica of {both}",
            MODEL_PARALLEL: "model parallel, layer by layer",
            PIPELINED: "pipeline, micro-batches",
        }.get(way, way)


def make_report(order: Order, placings: Sequence[Placing]) -> Report:
    kind, devices = placings[0].kind, placings[0].devices
    each = (
        "GPUs" if kind != CPU else f"halves of the processor, {_count(devices[0].num_threads, 'core')} each"
    )
    published = ", ".join(f"{way} {rate}" for way, rate in PUBLISHED.items())
    use = (
        "Utilisation is the processor time of the devices' processes, by the cores that they have."
        if kind == CPU
        else "Utilisation is what the driver says: the share of the time in which anything ran on the device."
    )
    return Report(
        "placement",
        f"two {each}, {order.repeat} passes of each.",
        (*(to_table(placing) for placing in placings), tabulate(list(judge(placings)))),
        (
            f"{use} Devices are in their order; ratios are taken repetition by repetition.",
            "Batch: padded tokens at most, and the texts that they hold in the mean. Rows that divide a batch "
            "(pipeline, fully sharded) get one twice as large, so that each device computes as much at a time.",
            "Batches are ready before the time starts, and all rows compute them with torch, padded unless they are "
            "packed. Model parallel has one batch on its way at a time, as a device map has; those that queue "
            "three, all others two.",
            "The bubble is that of batches that wait for one another; in a pass the next batch fills it. Ideal: "
            "(p-1)/(m+p-1) for p stages and the m micro-batches that a batch could be cut into.",
            f"Published for RexUniNLU, a DeBERTa base, on two GPUs, in texts/s: {published} (at batch 16, the pipeline "
            "at batch 32). They are another machine's: only the ratios compare with a processor's.",
            *(
                f"{record.name} was not measured for {placing.model}: {record.failure}"
                for placing in placings
                for record in placing.records.values()
                if record.failure is not None
            ),
        ),
    )


def to_table(placing: Placing) -> Table:
    """One row for each way; one that was not measured says so, and its reason stands in the notes."""
    title = f"{placing.model}: {placing.num_texts:,} texts, {placing.num_tokens:,} tokens"
    return Table((title, *COLUMNS), tuple(_row(placing, way) for way in placing.records))


def _row(placing: Placing, way: str) -> tuple[str, ...]:
    record = placing.measured(way)
    if record is None:
        return (placing.records[way].name, "not measured", *[""] * (len(COLUMNS) - 1))
    single, closeness = placing.measured(SINGLE), find_closeness(placing, way)
    said = record.report
    return (
        record.name,
        f"{said['batch_tokens']:,} ({write_number(said['batch_texts'])} texts)",
        record.rate(placing.num_texts).describe(write_number),
        write_number(record.rate(placing.num_tokens).median),
        " + ".join(f"{share:.0%}" for share in said["use"]),
        record.speed_against(single).describe(write_ratio) if single else "",
        write_mebibytes(record.whole_peak_bytes),
        write_cosine(closeness.smallest) if closeness else "",
    )


def find_closeness(placing: Placing, way: str) -> Closeness | None:
    """To the vectors of a single device."""
    record, single = placing.measured(way), placing.measured(SINGLE)
    if record is None or single is None or record.vectors is None or single.vectors is None:
        return None
    return Closeness.between(record.vectors, single.vectors)


def judge(placings: Sequence[Placing]) -> Iterator[Measure]:
    for placing in placings:
        replicas, whole = placing.measured(DATA_PARALLEL), placing.measured(WHOLE)
        if replicas and whole:
            ratio = replicas.speed_against(whole)
            yield Measure(
                f"{placing.model}: {replicas.name}, to {whole.name}",
                ratio.describe(write_ratio),
                f"≥ {REPLICAS_TARGET:g}×",
                ratio.median >= REPLICAS_TARGET,
            )
        for way in (PIPELINED, MODEL_PARALLEL):
            record = placing.measured(way)
            if record and "bubble" in record.report:
                bubble, ideal = record.report["bubble"], record.report["ideal_bubble"]
                yield Measure(
                    f"{placing.model}: bubble of {record.name}, ideal {write_share(ideal)}",
                    write_share(bubble),
                    f"≤ {write_share(ideal + BUBBLE_TOLERANCE)}",
                    bubble <= ideal + BUBBLE_TOLERANCE,
                )
        if placing.kind != CPU and placing.model == DEBERTA:
            yield from _judge_published(placing)
    cosines = [
        found.smallest
        for placing in placings
        for way in placing.records
        if way != SINGLE and (found := find_closeness(placing, way)) is not None
    ]
    if cosines:
        target = COSINE_TARGETS[placings[0].kind]
        smallest = min(cosines)
        name = "smallest cosine to a single device's vectors, all rows"
        yield Measure(name, write_cosine(smallest), f"≥ {target}", smallest >= target)


def _judge_published(placing: Placing) -> Iterator[Measure]:
    """Only where there are GPUs, as the published figures had."""
    for way, target in PUBLISHED.items():
        record = placing.measured(way)
        if record:
            rate = record.rate(placing.num_texts)
            name = f"{placing.model}: {record.name}, texts/s"
            yield Measure(name, rate.describe(write_number), f"> {target}", rate.median > target)


def _count(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number} {noun}s"
