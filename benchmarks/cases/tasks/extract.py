"""extract: records of five schemas from real texts, by the reference's way, our engine and our service, and in each way
in which two devices can hold the model. On a processor its two halves are the devices.

The weights are random, in the shape of DeBERTa-base and the published layout (vectormill.models.random_extractor): a
forward pass takes as long as with trained ones, and records mean nothing but that two systems agree.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.cases.engine.placement import (
    DATA_PARALLEL,
    MODEL_PARALLEL,
    PIPELINED,
    PUBLISHED,
    SINGLE,
    WHOLE,
)
from benchmarks.cases.tasks.extract_texts import NUM_CHARS, SCHEMAS, list_tagged_texts
from benchmarks.order import Order
from benchmarks.probes.machine import benchmark_device
from benchmarks.results.report import Report
from benchmarks.results.table import Measure, Table, tabulate
from benchmarks.results.writing import write_mebibytes, write_number, write_ratio, write_share
from benchmarks.systems.child import ChildSystem
from benchmarks.systems.extraction.engines import WAY, find_card, plan_replicas
from benchmarks.systems.extraction.extract_service import ExtractService
from benchmarks.systems.extraction.one_at_a_time import ENCODER, TRANSFORMERS
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.protocol import ChildOrder
from benchmarks.systems.system import System
from benchmarks.systems.turns import Record, Turns
from vectormill.cli.stack import workplace
from vectormill.domain.errors import VectormillError
from vectormill.domain.tasks.schema import list_types
from vectormill.models.random_extractor import BASE, TINY, write_random_extractor
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.settings import process_environment
from worker.devices.device import device_environment

NAME: Final = "extract"
MIX: Final = "five schemas"
MODEL: Final = "benchmark"
NUM_TEXTS: Final = 60
NUM_QUICK: Final = 10

REFERENCE: Final = "reference"
ALONE: Final = "one at a time"
ENGINE: Final = "engine"
SERVICE: Final = "service"
# Each with its title; those of the planner's ways beside the figures that were published for them.
TITLES: Final[Mapping[str, str]] = {
    REFERENCE: "the reference's way: one at a time, transformers' encoder",
    ALONE: "one at a time, our network",
    ENGINE: "our engine alone",
    SERVICE: "ours, end to end",
    SINGLE: "single, half of the processor",
    DATA_PARALLEL: "data parallel, two replicas",
    MODEL_PARALLEL: "model parallel, layer by layer",
    PIPELINED: "pipeline, micro-batches",
}
WAYS: Final = (SINGLE, DATA_PARALLEL, MODEL_PARALLEL, PIPELINED)
COLUMNS: Final = (
    "texts/s", "tokens/s", "to the reference's way", "padding of Σ L²", "peak memory", "records", "as the reference's",
    "published, texts/s",
)  # fmt: skip
SPEED_TARGET: Final = 5.0
PADDING_TARGET: Final = 0.05


@dataclass(frozen=True, slots=True)
class Extracted:
    """What every system did; `num_texts` are those of a pass."""

    num_texts: int
    records: Mapping[str, Record]

    def measured(self, key: str) -> Record | None:
        record = self.records.get(key)
        return record if record is not None and record.passes and record.failure is None else None

    def share_of_equal(self, key: str) -> float | None:
        """Which share of the texts has the very records that the reference's way found."""
        record, reference = self.measured(key), self.measured(REFERENCE)
        if record is None or reference is None or record.vectors is None or reference.vectors is None:
            return None
        return float(np.mean((record.vectors == reference.vectors).all(axis=1)))


def measure(order: Order) -> Report:
    repeat = 1 if order.is_quick else order.repeat
    texts = list_tagged_texts(order.items or (NUM_QUICK if order.is_quick else NUM_TEXTS))
    order.steps.begin(NAME, 1 + Turns.count_steps(len(TITLES), 1, repeat))
    with workplace(None) as directory:
        order.steps.step("writing random weights")
        tokenizer = Registry({}).card(DEFAULT_MODEL, weights=True).path
        shape = TINY if order.is_quick else BASE
        model = write_random_extractor(shape, tokenizer, directory / "model")
        with Turns(LineUp(directory, model, texts).make(), order.steps.step) as turns:
            records = turns.run(MIX, repeat)
    return make_report(Extracted(len(texts), records), repeat, is_quick=order.is_quick)


@dataclass(frozen=True, slots=True)
class LineUp:
    """Makes systems; starts none."""

    directory: Path
    model: Path
    texts: list[str]

    def make(self) -> dict[str, System]:
        (self.directory / "texts.json").write_text(json.dumps({MIX: self.texts}), encoding="utf-8")
        return {
            REFERENCE: self._make_child(REFERENCE, "one_at_a_time", {ENCODER: TRANSFORMERS}),
            ALONE: self._make_child(ALONE, "one_at_a_time", {}),
            ENGINE: self._make_child(ENGINE, "engines", {WAY: WHOLE}),
            SERVICE: self._make_service(),
            **{way: self._make_placed(way) for way in WAYS},
        }

    def _make_child(self, key: str, module: str, options: Mapping[str, str]) -> ChildSystem:
        name = key.replace(" ", "-")
        order = ChildOrder(
            str(self.model),
            str(self.directory / "texts.json"),
            str(self.directory / f"{name}.npy"),
            str(self.directory / "cache" / name),
            options=options,
        )
        environment = process_environment() | device_environment(benchmark_device())
        return ChildSystem(TITLES[key], f"benchmarks.systems.extraction.{module}", order, environment)

    def _make_placed(self, way: str) -> System:
        """A MissingSystem with the planner's reason where the model cannot be held in that way."""
        try:
            plan_replicas(find_card(str(self.model)), way)
        except VectormillError as error:
            return MissingSystem(TITLES[way], str(error))
        return self._make_child(way, "engines", {WAY: way})

    def _make_service(self) -> ExtractService:
        settings = {"VECTORMILL_MODELS": json.dumps({MODEL: {"path": str(self.model)}})}
        return ExtractService(self.directory / "service", {MIX: self.texts}, settings, MODEL)


def make_report(extracted: Extracted, repeat: int, *, is_quick: bool) -> Report:
    low, high = NUM_CHARS
    shape = "a tiny shape" if is_quick else "DeBERTa-base's shape"
    sizes = ", ".join(str(count_types(number)) for number in range(len(SCHEMAS)))
    return Report(
        NAME,
        f"{extracted.num_texts:,} docstrings of {low} to {high:,} characters, schemas of {sizes} types, {shape} with "
        f"random weights, {repeat} passes of each.",
        (to_table(extracted), tabulate(list(judge(extracted)))),
        (
            "Every system has both cores, but the single one. Ratios are taken repetition by repetition. Memory is of "
            "the processes that hold the model.",
            "The reference's way has our prompts, windows and decoding, which tests compare with the reference's, and "
            "transformers' DeBERTa, which projects the relative positions anew in every layer of every pass; all of it "
            "in batches of one. The second row is the same with our network.",
            "The weights are random, and records mean nothing: equal records show that batches, placements and jobs "
            "change none. Near 0 the sign of a logit may be another with other arithmetic.",
            f"Published for RexUniNLU on one GPU ({PUBLISHED[SINGLE]}) and on two: another machine's, so that only the "
            "ratios compare with a processor's.",
            *(f"{name} was not measured: {reason}" for name, reason in list_failures(extracted)),
        ),
    )


def list_failures(extracted: Extracted) -> Iterator[tuple[str, str]]:
    for record in extracted.records.values():
        if record.failure is not None:
            # Of a process that ended: its last words, which are the error's.
            yield record.name, record.failure.strip().splitlines()[-1].strip()


def count_types(number: int) -> int:
    return sum(1 for _ in list_types(SCHEMAS[number]))


def to_table(extracted: Extracted) -> Table:
    title = f"{MIX}: {extracted.num_texts:,} texts"
    return Table((title, *COLUMNS), tuple(_row(extracted, key) for key in extracted.records))


def _row(extracted: Extracted, key: str) -> tuple[str, ...]:
    record, reference = extracted.measured(key), extracted.measured(REFERENCE)
    published = f"{PUBLISHED[key]}" if key in PUBLISHED else ""
    if record is None:
        return (extracted.records[key].name, "not measured", *[""] * (len(COLUMNS) - 2), published)
    padding, equal = record.report["square_padding"], extracted.share_of_equal(key)
    return (
        record.name,
        record.rate(extracted.num_texts).describe(write_number),
        write_number(record.rate(record.passes[-1].num_tokens).median),
        record.speed_against(reference).describe(write_ratio) if reference else "",
        "" if padding is None else write_share(padding),
        write_mebibytes(record.model_peak_bytes),
        f"{record.report['num_records']:,}",
        "" if equal is None else write_share(equal),
        published,
    )


def judge(extracted: Extracted) -> Iterator[Measure]:
    reference, engine = extracted.measured(REFERENCE), extracted.measured(ENGINE)
    alone = extracted.measured(ALONE)
    if reference and engine:
        ratio = engine.speed_against(reference)
        yield Measure(
            "our engine, to the reference's way",
            ratio.describe(write_ratio),
            f"≥ {SPEED_TARGET:g}×",
            ratio.median >= SPEED_TARGET,
        )
    if alone and engine:
        yield Measure(
            "our engine, to our network one at a time", engine.speed_against(alone).describe(write_ratio)
        )
    if engine:
        padding = engine.report["square_padding"]
        yield Measure(
            "padding, of all squared lengths that are computed",
            write_share(padding),
            f"≤ {PADDING_TARGET:.0%}",
            padding <= PADDING_TARGET,
        )
    shares = [share for key in extracted.records if (share := extracted.share_of_equal(key)) is not None]
    if shares:
        yield Measure(
            "texts with the very records of the reference's way, in the worst row",
            write_share(min(shares)),
            "100%",
            min(shares) == 1.0,
        )
