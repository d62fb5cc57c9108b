"""`placement` and `footprint`: batches, plans and judgements, without a process of theirs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cases.engine.footprint import Prediction, make_texts
from benchmarks.cases.engine.placement import (
    DATA_PARALLEL,
    DEBERTA,
    PIPELINED,
    SINGLE,
    SWITCHED,
    TENSOR_PARALLEL,
    TEXTS,
    WHOLE,
    Placing,
    WayPlanner,
    judge,
    list_ways,
    make_card,
    to_table,
    tokenize,
)
from benchmarks.order import BenchmarkFailed
from benchmarks.probes.device_use import DeviceUseSampler
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.placed import PlacedModel, cut_batches, find_ideal_bubble
from benchmarks.systems.protocol import Pass
from benchmarks.systems.turns import Record
from worker.devices.device import CPU, CUDA, Device, Inventory

HALVES = tuple(Device(f"cpu:{number}", CPU, number, (number,), 1, 1 << 30) for number in range(2))


def record(name: str, seconds: float, **said: Any) -> Record:
    report: Mapping[str, Any] = {"batch_tokens": 1024, "batch_texts": 12.5, "use": (0.9,), **said}
    return Record(name, [Pass(seconds, 100, 100)], vectors=np.eye(2, dtype=np.float32), report=report)


def placing(kind: str = CPU, model: str = "tiny", **records: Record) -> Placing:
    named = {name.replace("_", " "): each for name, each in records.items()}
    return Placing(model, kind, HALVES, 100, 1000, named)


def test_batches_hold_every_text_once_and_no_more_than_their_tokens() -> None:
    ids = [np.arange(length, dtype=np.int32) for length in (3, 30, 9, 9, 50, 1)]
    batches = cut_batches(ids, 40)
    assert [places for places, _ in batches] == [[4], [1], [2, 3, 0, 5]]
    assert all(batch.num_padded_tokens <= 40 for _, batch in batches[1:]), (
        "only a text alone may be longer than a batch"
    )
    assert [list(batch.lengths) for _, batch in batches] == [[50], [30], [9, 9, 3, 1]]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "bubble"), [(1, 8, 0), (2, 1, 1 / 2), (2, 8, 1 / 9), (4, 16, 3 / 19)]
)
def test_an_ideal_pipeline_is_idle_while_it_fills_and_empties(
    stages: int, micro_batches: int, bubble: float
) -> None:
    assert find_ideal_bubble(stages, micro_batches) == pytest.approx(bubble)


def test_replicas_are_judged_by_one_over_the_same_cores_and_a_pipeline_by_the_ideal_bubble() -> None:
    found = placing(
        single=record("single", 4.0),
        data_parallel=record("two replicas", 2.0),
        one_over_all=record("one replica", 1.7),
        pipeline=record("pipeline", 2.2, bubble=0.3, ideal_bubble=0.111),
    )
    assert [measure.row() for measure in judge([found])] == [
        ("tiny: two replicas, to one replica", "0.85×", "≥ 0.9×, **missed**"),
        ("tiny: bubble of pipeline, ideal 11.1%", "30.0%", "≤ 26.1%, **missed**"),
        ("smallest cosine to a single device's vectors, all rows", "1.000000", "≥ 0.99999, met"),
    ]


def test_published_figures_are_judged_on_gpus_alone() -> None:
    rows = {"single": record("single", 2.0), "pipeline": record("pipeline", 1.5)}
    on_gpu = [measure.row() for measure in judge([placing(CUDA, DEBERTA, **rows)])]
    assert ("deberta-base: single, texts/s", "50.0", "> 45, met") in on_gpu
    assert ("deberta-base: pipeline, texts/s", "66.7", "> 88, **missed**") in on_gpu
    assert not any("texts/s" in measure.name for measure in judge([placing(CPU, DEBERTA, **rows)]))


def test_a_way_that_was_not_measured_says_so_in_its_row() -> None:
    found = placing(single=record("single", 4.0), tensor_parallel=Record("tensor parallel", failure="heads"))
    rows = to_table(found).rows
    assert rows[0][:3] == ("single", "1,024 (12.5 texts)", "25.0")
    assert rows[1][:2] == ("tensor parallel", "not measured")


def test_a_deberta_is_placed_in_every_way_but_one(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = Inventory((), ((0,), (1,)), 16 << 30, frozenset(), "two cores")
    monkeypatch.setattr("benchmarks.cases.engine.placement.detect_inventory", lambda: inventory)
    card = make_card("tiny-deberta", tmp_path_factory.mktemp("models"))
    mixes = {TEXTS: tokenize(card, 5)}
    assert len(mixes[TEXTS]) == 5
    planner = WayPlanner(card, CPU)
    systems = {way: planner.make(way, mixes) for way in list_ways(CPU)}
    placed = {way for way, system in systems.items() if isinstance(system, PlacedModel)}
    assert set(systems) - placed == {TENSOR_PARALLEL}
    refused = systems[TENSOR_PARALLEL]
    assert isinstance(refused, MissingSystem)
    with pytest.raises(BenchmarkFailed, match="relative positions"):
        refused.__enter__()
    assert [systems[way].name for way in (SINGLE, DATA_PARALLEL, WHOLE, PIPELINED)] == [
        "single, one core",
        "data parallel, two replicas of one core",
        "one replica of 2 cores",
        "pipeline, micro-batches",
    ]


def test_gpus_have_rows_for_ranks_that_queue_and_pack_where_the_model_can_be_packed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(
        Device(f"cuda:{number}", CUDA, number, (), 1, 16 << 30, features=frozenset({"sm_90"}))
        for number in range(2)
    )
    inventory = Inventory(gpus, ((0,),), 16 << 30, frozenset(), "two cards")
    monkeypatch.setattr("benchmarks.cases.engine.placement.detect_inventory", lambda: inventory)
    assert not SWITCHED.keys() & set(list_ways(CPU))
    assert SWITCHED.keys() <= set(list_ways(CUDA))
    packaged = WayPlanner(make_card("packaged", Path()), CUDA)
    made = {way: packaged.make(way, {}) for way in SWITCHED}
    assert all(isinstance(system, PlacedModel) for system in made.values())
    packed = made["pipeline, packed_ranks and queued_ranks"]
    assert packed._way.switches == ("packed_ranks", "queued_ranks")  # type: ignore[attr-defined]
    assert packed._way.batches_ahead == 3  # type: ignore[attr-defined]
    deberta = WayPlanner(make_card("tiny-deberta", tmp_path_factory.mktemp("models")), CUDA)
    missing = {way for way in SWITCHED if isinstance(deberta.make(way, {}), MissingSystem)}
    assert missing == {way for way in SWITCHED if "packed" in way or way.startswith(TENSOR_PARALLEL)}


def test_two_gpus_are_asked_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda:0", CUDA, 0, (), 1, 16 << 30)
    inventory = Inventory((gpu,), ((0,),), 1 << 30, frozenset(), "")
    monkeypatch.setattr("benchmarks.cases.engine.placement.detect_inventory", lambda: inventory)
    with pytest.raises(BenchmarkFailed, match="needs 2 GPUs; there is cuda:0"):
        WayPlanner(make_card("packaged", None), CUDA)  # type: ignore[arg-type]


def test_a_prediction_is_off_by_a_share_of_what_was_found() -> None:
    near = Prediction("near", 100 << 20, 10 << 20, 90 << 20, 10 << 20)
    far = Prediction("far", 50 << 20, 20 << 20, 50 << 20, 50 << 20)
    assert near.row()[-2:] == ("+10.0%", "± 15%, met")
    assert far.row()[-2:] == ("-30.0%", "± 15%, **missed**")


def test_texts_for_memory_have_padding_among_them() -> None:
    assert {len(ids) for ids in make_texts(1024)} == {127, 128}
    assert len(make_texts(1024)) == 8


def test_the_use_of_a_device_is_the_mean_of_what_its_driver_says() -> None:
    answers = iter([0.5, None, 1.0])  # None: the driver could not tell
    num_asked = 0

    def read() -> float | None:
        nonlocal num_asked
        num_asked += 1
        return next(answers, 0.75)

    with DeviceUseSampler(read, pause_seconds=0.001) as use:
        while num_asked < 3:  # the test's own time limit ends it
            pass
    assert use.share == pytest.approx(0.75)
