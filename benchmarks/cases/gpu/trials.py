"""The trials of a card: pairs of passes without and with a switch, sweeps of budgets. In the process of a step.

A trial sends batches of random ids to the process that a worker starts; nothing tokenizes, so what differs is the
device's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from benchmarks.cases.engine.footprint import plan_replica
from benchmarks.cases.gpu.choosing import Pair, Timed, Together, choose_together
from benchmarks.cases.gpu.plan import Scale, Sized, Step
from benchmarks.models.random_weights import write_random_model
from benchmarks.models.shapes import SHAPES, VOCABULARY
from benchmarks.order import BenchmarkFailed
from benchmarks.probes.model_cost import ModelCost
from benchmarks.systems.placed import Ids, PlacedModel, Way
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.batching.climb import choose_size
from worker.devices.device import CPU, Device
from worker.encoder.backends import AUTO
from worker.encoder.choice import FP32, choose_precision
from worker.encoder.switches import SWITCHES
from worker.model.architectures import PACKED
from worker.placement.strategies import REPLICATE
from worker.runner.starter import Sharing

FIRST_ID: Final = 1000  # below it are special tokens
IS_WRITTEN: Final = ".written"
# Of the matrix rate, for the length of a pass alone.
EXPECTED_SHARE: Final = 0.5
GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Workbench:
    """What a step has: `devices` are those of the plan, the first of which all but shared models are measured on.

    `given` is what earlier steps found, `tell` keeps what this one has found so far, and `deadline` is its limit on
    the monotonic clock.
    """

    scale: Scale
    step: Step
    devices: tuple[Device, ...]
    models: Path
    directory: Path
    given: Mapping[str, Any]
    tell: Callable[[Mapping[str, Any]], None]
    deadline: float

    @property
    def device(self) -> Device:
        return self.devices[0]

    @property
    def sized(self) -> Sized:
        return self.scale.of(self.step.shape)

    @property
    def precision(self) -> str:
        """As a worker chooses it; on a processor that of its exact kernel."""
        return FP32 if self.device.kind == CPU else choose_precision(AUTO, self.device).value

    def find_card(self, shape: str) -> ModelCard:
        """The model of random weights, written if it is not there whole."""
        directory = self.models / f"{shape}-{crc32(repr(SHAPES[shape]).encode()):08x}"
        if not (directory / IS_WRITTEN).is_file():
            write_random_model(SHAPES[shape], Registry({}).card(DEFAULT_MODEL).path, directory)
            (directory / IS_WRITTEN).touch()
        return read_model_card(shape, directory)

    def place(
        self, card: ModelCard, mixes: Mapping[str, Ids], switches: Sequence[str], strategy: str = REPLICATE
    ) -> PlacedModel:
        """Packed, in the process or processes that a worker starts; nothing is started yet."""
        devices = self.devices[:1] if strategy == REPLICATE else self.devices[:2]
        replica = plan_replica(card, devices, self.precision, strategy)
        name = f"{card.name} with {', '.join(switches) or 'no switch'}"
        # On a card that is what auto means; a processor has to be asked, and then shared models are packed too.
        is_packed = strategy == REPLICATE or any(SWITCHES[switch].needs_packed for switch in switches)
        attention = PACKED if self.device.kind == CPU and is_packed else AUTO
        return PlacedModel(
            Way(name, (Sharing(replica, devices),), self.sized.batch_tokens),
            card,
            self.precision,
            mixes,
            attention=attention,
            switches=switches,
        )


def write_weights(bench: Workbench) -> None:
    """Of all shapes, so that no step after this one waits for a disk."""
    for sized in bench.scale.sized:
        bench.find_card(sized.shape)
        bench.tell({"written": sized.shape})


def measure_alone(bench: Workbench) -> None:
    bench.tell(asdict(measure_pair(bench, (), bench.step.switch)))


def measure_together(bench: Workbench) -> None:
    """Candidates one after the other, the best first, while there is time for another pair."""
    longest = 0.0

    def measure(base: tuple[str, ...], name: str) -> Pair | None:
        nonlocal longest
        began = time.monotonic()
        if began + longest > bench.deadline:
            return None
        pair = measure_pair(bench, base, name)
        longest = max(longest, time.monotonic() - began)
        return pair

    def tell(together: Together) -> None:
        bench.tell(asdict(together))

    tell(choose_together(bench.given["candidates"], measure, tell))


def measure_ranks(bench: Workbench) -> None:
    """A switch of models that two devices share, beside the same placement without it.

    On texts of mixed lengths: where all are equal there is no padding to leave out.
    """
    bench.tell(asdict(measure_pair(bench, (), bench.step.switch, bench.step.strategy)))


def measure_pair(bench: Workbench, base: tuple[str, ...], added: str, strategy: str = REPLICATE) -> Pair:
    """Both are loaded at the same time, and take turns. Raises BenchmarkFailed where the switch is not in use."""
    card, sized = bench.find_card(bench.step.shape), bench.sized
    cost, rate = ModelCost.of(card), find_rate(bench)
    mixes = {
        length: draw_ids(count_texts(sized, length, cost, rate), (length, length)) for length in sized.lengths
    }
    if strategy != REPLICATE:
        ends = min(sized.lengths), max(sized.lengths)
        mixed = draw_ids(count_texts(sized, sum(ends) // 2, cost, rate), ends)
        mixes = {round(sum(map(len, mixed)) / len(mixed)): mixed}
    with ExitStack() as exits:
        named = {str(length): ids for length, ids in mixes.items()}
        pair = [bench.place(card, named, switches, strategy) for switches in (base, (*base, added))]
        enter_both(exits, pair)
        check_switches(pair[1], (*base, added))
        by_length, peaks = {}, [0, 0]
        for length, ids in mixes.items():
            seconds: list[list[float]] = [[], []]
            for number in range(1 + bench.scale.repeat):
                for place, system in enumerate(pair):
                    done = system.encode(str(length))
                    peaks[place] = max(peaks[place], max(each.peak_bytes for each in system.readings()))
                    if number:  # the first is to warm up
                        seconds[place].append(done.seconds)
            lengths = np.array([len(each) for each in ids], dtype=np.int64)
            flop = cost.count_flop(lengths)
            by_length[length] = Timed(int(lengths.sum()), flop, tuple(seconds[0]), tuple(seconds[1]))
        loaded = pair[1].loaded
        assert loaded is not None, "it was entered"
        return Pair(base, added, by_length, peaks[0], peaks[1], loaded.precision.value, loaded.attention)


def enter_both(exits: ExitStack, systems: Sequence[PlacedModel]) -> None:
    """Loads them side by side; those that are loaded are stopped when the other is not."""

    def enter(system: PlacedModel) -> None:
        system.__enter__()
        exits.push(system.__exit__)

    with ThreadPoolExecutor(len(systems)) as threads:
        list(threads.map(enter, systems))


def check_switches(system: PlacedModel, wanted: Sequence[str]) -> None:
    """Raises BenchmarkFailed with what the process says of a switch that it does not use."""
    assert system.loaded is not None, "it was entered"
    missing = [name for name in wanted if name not in system.loaded.switches]
    if missing:
        notes = " ".join(note for note in system.loaded.notes if any(name in note for name in missing))
        raise BenchmarkFailed(notes or f"It does not use {', '.join(missing)}, and does not say why.")


def measure_budgets(bench: Workbench) -> None:
    """Tokens a second by the tokens of a batch, all sizes in turn; a size that does not fit ends the sweep upwards."""
    card, scale = bench.find_card(bench.step.shape), bench.scale
    sizes = scale.budget_sizes
    num_texts = max(sizes) // scale.budget_length
    ids = draw_ids(num_texts, (scale.budget_length, scale.budget_length))
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    kept = tuple(bench.given["kept"])
    with bench.place(card, {"all": ids}, kept) as system:
        for number in range(1 + scale.repeat):
            for size in sizes:
                system.resize(size)
                done = system.encode("all")
                if number:  # the first is to warm up
                    rates[size].append(done.num_tokens / done.seconds)
            if number:
                bench.tell(describe_budgets(kept, scale.budget_length, rates))


def describe_budgets(
    kept: Sequence[str], length: int, rates: Mapping[int, Sequence[float]]
) -> dict[str, Any]:
    """The knee is the smallest size that is as good as the best, by the rule that the tuner has."""
    medians = {size: float(np.median(values)) for size, values in rates.items()}
    return {
        "switches": list(kept),
        "length": length,
        "rates": {str(size): list(values) for size, values in rates.items()},
        "knee": choose_size(medians),
        "best_rate": max(medians.values()),
    }


def draw_ids(num_texts: int, ends: tuple[int, int]) -> Ids:
    """Random ids, the same each time, in texts of any length between two, both included."""
    shortest, longest = ends
    random = np.random.default_rng(longest)
    drawn = random.integers(FIRST_ID, VOCABULARY, (num_texts, longest), dtype=np.int32)
    lengths = random.integers(shortest, longest, num_texts, endpoint=True)
    return [row[:length] for row, length in zip(drawn, lengths, strict=True)]


def count_texts(sized: Sized, length: int, cost: ModelCost, flop_per_second: float) -> int:
    """Texts of a pass: whole batches, of about so many seconds, and at least two so that one waits for the other."""
    per_batch = max(1, sized.batch_tokens // length)
    flop = cost.count_flop(np.full(per_batch, length, dtype=np.int64))
    batches = sized.pass_seconds * EXPECTED_SHARE * flop_per_second / flop
    return per_batch * max(2, round(batches))


def find_rate(bench: Workbench) -> float:
    """Operations a second of the matrix product that an earlier step measured. Raises BenchmarkFailed without one."""
    rates = bench.given.get("rates") or {}
    if not rates:
        raise BenchmarkFailed(
            "The matrix rate was not measured, by which a pass gets its length; repeat `rates`."
        )
    return GIGA * float(rates.get(bench.precision, max(rates.values())))
