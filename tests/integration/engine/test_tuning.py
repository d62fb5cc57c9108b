"""A worker finds the fastest way by real processes, keeps it for others, and changes to it without losing a text."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tuned_encoder import BEHAVIOURS, CRASHES, DIES_IN_SERVICE, RAISES, WRONG
from tests.waiting import wait_for
from vectormill.domain.errors import ModelError
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import EncoderOrder
from worker.encoder.way import Way
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.runner.channel import NUM_BLOCKS, Channel
from worker.runner.messages import Encode
from worker.runner.starter import RunnerStarter
from worker.settings import WorkerSettings
from worker.tuning import comparison, record
from worker.tuning.record import TuningRecords
from worker.tuning.self_tuning import SelfTuning
from worker.tuning.trial import Trial, TrialFailed, TrialStopped
from worker.tuning.tuner import find_record, list_ways

CARD = Registry({}).card(DEFAULT_MODEL)
SPEC = make_spec(CARD, EncodingOptions(normalize=False))
DEVICE = split_processor(detect_inventory(), 1)[0]
SLOW: dict[str, Any] = {"seconds": 0.03}
FAST: dict[str, Any] = {"seconds": 0.006}


@pytest.fixture(autouse=True)
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches take the same time whenever they are timed, so that a moment is enough."""
    monkeypatch.setattr(comparison, "PASS_SECONDS", 0.02)
    monkeypatch.setattr(comparison, "NUM_PASSES", 2)


@contextmanager
def running(cache_dir: Path, behaviours: Mapping[str, Any], **settings: Any) -> Iterator[Engine]:
    (cache_dir / BEHAVIOURS).write_text(json.dumps(behaviours))
    engine = Engine(
        CARD,
        DEVICE,
        WorkerSettings(reuse_bytes=0, **settings),
        cache_dir,
        factory="tests.tuned_encoder:TunedEncoder",
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def tune(engine: Engine) -> tuple[str, list[str]]:
    with engine.make_way_tuner().tuned(threading.Event()) as found:
        return found.way.backend, [finding.flaw for finding in found.findings]


@pytest.mark.parametrize(
    ("second", "expected", "flaw"),
    [
        (FAST, "torch", ""),
        ({"seconds": 0.05}, "openvino", ""),
        (FAST | {"fault": WRONG}, "openvino", "its results differ: its vector has changed"),
        (FAST | {"fault": CRASHES}, "openvino", "the model process ended"),
        (FAST | {"fault": RAISES}, "openvino", "no kernel for this card"),
    ],
)
def test_the_fastest_way_that_is_right_is_found(
    second: Mapping[str, Any], expected: str, flaw: str, new_cache_dir: Callable[[], Path]
) -> None:
    with running(new_cache_dir(), {"openvino": SLOW, "torch": second}) as engine:
        backend, flaws = tune(engine)
    assert backend == expected
    assert flaws[0] == ""
    assert flaw in flaws[1]
    assert bool(flaw) == bool(flaws[1])


def test_what_one_worker_found_holds_for_the_next_until_it_is_forgotten(
    new_cache_dir: Callable[[], Path],
) -> None:
    cache_dir = new_cache_dir()
    behaviours = {"openvino": SLOW, "torch": FAST}
    with running(cache_dir, behaviours) as engine:
        assert engine.report()["backend"]["value"] == "openvino", "nothing is known yet"
        tune(engine)
    with running(cache_dir, behaviours) as engine:
        assert engine.report()["backend"]["value"] == "torch"
        started: list[object] = []
        with engine.make_way_tuner().tuned(threading.Event(), started.append):
            assert started == [], "nothing is tried twice"
    with running(cache_dir, behaviours, precision="fp32") as engine:
        assert engine.report()["backend"]["value"] == "openvino", (
            "another precision may be faster in another way"
        )
    assert TuningRecords(cache_dir).forget(CARD.name) == 1
    with running(cache_dir, behaviours) as engine:
        assert engine.report()["backend"]["value"] == "openvino"


@pytest.mark.parametrize(
    "settings", [{"reproducible": True}, {"backend": "torch"}, {"attention": "packed"}], ids=str
)
def test_nothing_is_tried_and_no_record_used_where_bits_may_not_change_or_there_is_one_way(
    settings: dict[str, Any], new_cache_dir: Callable[[], Path]
) -> None:
    with running(new_cache_dir(), {"openvino": SLOW, "torch": FAST}) as engine:
        tune(engine)
        order = engine.make_way_tuner().order
    found = find_record(order)
    assert found is not None
    assert found.way == Way("torch")
    refused = replace(
        order,
        is_reproducible="reproducible" in settings,
        backend=settings.get("backend", "auto"),
        attention=settings.get("attention", "auto"),
    )
    assert len(list_ways(refused)) < 2
    assert find_record(refused) is None


def test_a_recorded_way_that_cannot_be_loaded_any_more_stops_no_worker(
    new_cache_dir: Callable[[], Path],
) -> None:
    for fault in (CRASHES, RAISES):
        cache_dir = new_cache_dir()
        with running(cache_dir, {"openvino": SLOW, "torch": FAST}) as engine:
            tune(engine)
        with running(cache_dir, {"openvino": SLOW, "torch": FAST | {"fault": fault}}) as engine:
            report = engine.report()
        assert report["backend"]["value"] == "openvino"
        assert report["way"]["reason"].startswith(
            "measured here on"  # of the ways that are left, the usual one is the fastest
        )
        assert (
            "torch was measured to be faster, but is not used: its process was lost"
            in report["way"]["reason"]
        )
        with running(cache_dir, {"openvino": SLOW, "torch": FAST}) as engine:
            report = engine.report()
        assert report["backend"]["value"] == "openvino", "the next worker does not try it again"
        assert [bool(found["flaw"]) for found in report["ways"]] == [False, True]


def test_a_failure_that_may_pass_is_tried_again_after_a_day(
    new_cache_dir: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    with running(new_cache_dir(), {"openvino": SLOW, "torch": FAST | {"fault": CRASHES}}) as engine:
        for _ in range(2):
            with engine.make_way_tuner().tuned(threading.Event(), tried.append):
                assert len(tried) == 2
        monkeypatch.setattr(record, "STALE_AFTER", timedelta(0))
        with engine.make_way_tuner().tuned(threading.Event(), tried.append):
            assert len(tried) == 4


def test_without_a_way_that_works_and_for_a_worker_that_stops_nothing_is_kept(
    new_cache_dir: Callable[[], Path],
) -> None:
    cache_dir = new_cache_dir()
    with running(cache_dir, {"openvino": SLOW, "torch": FAST}) as engine:
        stopping = threading.Event()
        stopping.set()
        with pytest.raises(TrialStopped), engine.make_way_tuner().tuned(stopping):
            pass
        crashing = {"seconds": 0.0, "fault": CRASHES}
        (cache_dir / BEHAVIOURS).write_text(json.dumps({"openvino": crashing, "torch": crashing}))
        with (
            pytest.raises(TrialFailed, match="the model process ended"),
            engine.make_way_tuner().tuned(threading.Event()),
        ):
            pass
    assert not list((cache_dir / "tuned").glob("*.json"))


def test_one_worker_of_a_card_measures_and_the_others_take_what_it_found(
    new_cache_dir: Callable[[], Path],
) -> None:
    tried: list[str] = []

    def search(engine: Engine) -> str:
        with engine.make_way_tuner().tuned(threading.Event(), lambda way: tried.append(str(way))) as found:
            return str(found.way)

    with (
        running(new_cache_dir(), {"openvino": SLOW, "torch": FAST}) as engine,
        ThreadPoolExecutor(3) as threads,
    ):
        assert list(threads.map(search, [engine] * 3)) == ["torch"] * 3
    assert tried == ["openvino", "torch", "openvino"], "the usual way is measured again at the end"


class Proofs:
    """Stands in for the prover of a worker."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prove(self) -> str:
        self.calls.append("prove")
        return ""

    def expect_new_way(self) -> None:
        self.calls.append("expect_new_way")


@pytest.mark.parametrize(("fault", "expected"), [({}, "torch"), ({"fault": DIES_IN_SERVICE}, "openvino")])
def test_a_worker_changes_to_the_fastest_way_while_it_serves_and_goes_back_if_it_cannot_be_loaded(
    fault: dict[str, Any], expected: str, new_cache_dir: Callable[[], Path]
) -> None:
    proofs = Proofs()
    with running(new_cache_dir(), {"openvino": SLOW, "torch": FAST | fault}, max_runner_restarts=0) as engine:

        def encode(number: int) -> Any:
            texts = [f"text {number} {place}".encode() for place in range(20)]
            return engine.encode(EncodeRequest(str(number), SPEC, texts, False, 1000), threading.Event())

        expected_vectors = [encode(number).vectors for number in range(3)]
        # Work that never ends: nothing is idle, so the ways are compared after `busy_seconds` beside it.
        tuning = SelfTuning(engine, proofs, idle_seconds=0.05, busy_seconds=0.2)  # type: ignore[arg-type]
        tuning.start()
        with ThreadPoolExecutor(3) as threads:
            while tuning.is_alive:
                for number, result in enumerate(threads.map(encode, range(3))):
                    assert not result.failures
                    np.testing.assert_array_equal(result.vectors, expected_vectors[number])
        tuning.stop()
        for number in range(3):
            np.testing.assert_array_equal(encode(number).vectors, expected_vectors[number])
        report = engine.report()
        assert report["backend"]["value"] == expected
        assert (report["num_restarts"], report["num_exchanges"]) == (0, 1), "nothing was lost"
        assert report["way"]["value"] == expected
        assert "measured here on" in report["way"]["reason"]
        assert [found["way"] for found in report["ways"]] == ["openvino", "torch"]
        assert proofs.calls == ["prove", "expect_new_way"], "a new way begins a new period of proofs"


def test_a_worker_goes_back_if_its_new_way_leaves_the_certificate_and_its_batches_start_over(
    new_cache_dir: Callable[[], Path],
) -> None:
    proofs, checked, sizes = Proofs(), [], []

    def check(engine: Engine) -> None:
        checked.append(engine.report()["backend"]["value"])
        sizes.append(engine.report()["budgets"]["up to 64"]["max_batch_tokens"])
        engine.refuse_way("another vector is certified")
        raise ModelError("another vector is certified")

    with running(new_cache_dir(), {"openvino": SLOW, "torch": FAST}) as engine:
        assert f"`vectormill tune {CARD.name}`" in engine.report()["way"]["reason"], (
            "nothing was measured yet"
        )
        texts = [f"text {place}".encode() for place in range(5000)]
        engine.encode(EncodeRequest("all", SPEC, texts, False, 1000), threading.Event())
        assert engine.report()["budgets"]["up to 64"]["max_batch_tokens"] > 1024, "batches have grown"
        tuning = SelfTuning(engine, proofs, check, idle_seconds=0.05)  # type: ignore[arg-type]
        tuning.start()
        wait_for(lambda: not tuning.is_alive)
        report = engine.report()
        order = engine.make_way_tuner().order
    assert checked == ["torch"]
    assert sizes == [1024], "what was learned of one way says nothing about another"
    assert report["backend"]["value"] == "openvino"
    assert report["num_exchanges"] == 2
    assert (
        "torch was measured to be faster, but is not used: another vector is certified"
        in report["way"]["reason"]
    )
    found = find_record(order)
    assert found is not None
    assert found.way.backend == "openvino"


def test_a_long_pass_is_measured_in_shared_memory_like_work_in_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[int | None] = []
    send = Channel.send

    def note(channel: Channel, message: object, block: int | None = None) -> None:
        if isinstance(message, Encode):
            blocks.append(block)
        send(channel, message, block)

    monkeypatch.setattr(Channel, "send", note)
    (tmp_path / BEHAVIOURS).write_text(json.dumps({"torch": {"seconds": 0.0}}))
    order = EncoderOrder(CARD, DEVICE, "torch", "auto", 1, tmp_path)
    factory = "tests.tuned_encoder:TunedEncoder"
    starter = RunnerStarter(factory, order, os.environ, collective_timeout_seconds=1)
    batches = [Batch.from_ids([np.array([1, number], np.int32)]) for number in range(NUM_BLOCKS + 20)]
    with Trial(starter, load_seconds=60, answer_seconds=60) as trial:
        assert trial.measure(batches) > 0
        assert len(blocks) == len(batches)
        assert None not in blocks, "a batch without a block goes through the pipe, which is slower"
        assert [rows.matrix[0, 1] for rows in trial.encode(batches[:5])] == [0, 1, 2, 3, 4]
