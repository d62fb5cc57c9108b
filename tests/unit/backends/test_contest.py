"""The contest between backends: what follows from it, how it survives its candidates, and where its outcome is kept."""

import json
import os
import signal
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from vectormill.domain.errors import ModelError
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.backends.contest import rounds
from worker.backends.contest.candidate import Candidate
from worker.backends.contest.choice import choose_by_contest
from worker.backends.contest.outcome import Outcome, decide_contest
from worker.backends.contest.outcomes import find_or_measure
from worker.backends.contest.rounds import find_vocabulary_size, hold_contest, make_batches
from worker.batching.token_batch import TokenBatch
from worker.devices.device import Device
from worker.encoder.encoder import Choice, EncoderOrder, EncoderReport

DAY = "2026-11-21"
CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
CORES = tuple(sorted(os.sched_getaffinity(0)))[:1]
DEVICE = Device("cpu:0", "cpu", 0, CORES, 1, 1 << 34, frozenset({"avx2"}), "a processor")
ORDER = EncoderOrder(CARD, DEVICE, "auto", "fp32", 1, Path("/nowhere"))
BATCH = TokenBatch.from_ids([np.arange(30, dtype=np.int32)])


NUM_STREAMS = defaultdict(lambda: 1, {"slow, four streams": 4})


class FakeEncoder:
    """Does what the order's precision says; the first pass is slow, as everywhere."""

    def __init__(self, behaviour: str) -> None:
        self._behaviour = behaviour
        self._num_passes = 0

    def encode(self, batch: TokenBatch) -> NDArray[np.float32]:
        self._num_passes += 1
        if self._behaviour == "crash" and self._num_passes == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._behaviour == "hang":
            threading.Event().wait()
        assert tuple(os.sched_getaffinity(0)) == CORES
        # The speed that the contest is to find: a slow first pass, which must not count, then slow or fast ones.
        time.sleep(0.5 if self._num_passes == 1 else 0.01 if self._behaviour == "fast" else 0.1)
        return np.zeros((len(batch), 2), np.float32)

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0, num_streams=NUM_STREAMS[self._behaviour])


def load_fake(order: EncoderOrder) -> FakeEncoder:
    if order.precision == "refuse":
        raise ModelError("openvino cannot do this.")
    if order.precision == "end":
        os._exit(7)
    return FakeEncoder(order.precision)


def hold(openvino: str, torch: str) -> Outcome:
    starts = {
        backend: partial(Candidate, replace(ORDER, precision=behaviour), f"{__name__}:load_fake")
        for backend, behaviour in (("openvino", openvino), ("torch", torch))
    }
    return hold_contest(starts, [BATCH, BATCH], DAY)


@pytest.mark.parametrize(
    ("openvino", "torch", "expected"),
    [
        (8400, 7300, "openvino"),
        (7300, 8400, "torch"),
        (8000, 8390, "openvino"),  # a lead that another contest may not repeat
        (8000, 8410, "torch"),
    ],
)
def test_the_faster_backend_is_taken_with_both_figures_as_the_reason(
    openvino: float, torch: float, expected: str
) -> None:
    choice = decide_contest(Outcome(DAY, {"openvino": openvino, "torch": torch}))
    assert choice.value == expected
    assert f"measured here on 2026-11-21: openvino {openvino:,} tokens/s, torch {torch:,}" in choice.reason


def test_without_any_figure_openvino_is_taken_and_says_that_nothing_was_measured() -> None:
    choice = decide_contest(Outcome(DAY, losses={"openvino": "no memory", "torch": "no memory"}))
    assert (choice.value, choice.reason) == ("openvino", "not measured: no memory")


def test_the_faster_candidate_wins_on_the_cores_of_the_device() -> None:
    outcome = hold("slow", "fast")
    assert outcome.rates["torch"] > outcome.rates["openvino"] > 0
    assert outcome.rates["torch"] > 1000  # 30 tokens in 10 ms; with the first pass it would be 60
    assert (outcome.losses, outcome.is_lasting) == ({}, True)


def test_a_candidate_that_encodes_side_by_side_is_measured_so() -> None:
    outcome = hold("slow", "slow, four streams")
    assert 2 < outcome.rates["torch"] / outcome.rates["openvino"] < 5


@pytest.mark.parametrize(
    ("behaviour", "reason", "is_lasting"),
    [
        ("crash", "its process was ended by SIGSEGV", False),  # it may not crash the next time
        ("end", "its process ended with status 7", False),
        ("refuse", "openvino cannot do this.", True),  # nor will it at the next start
    ],
)
def test_a_candidate_that_is_lost_leaves_the_victory_to_the_other(
    behaviour: str, reason: str, is_lasting: bool
) -> None:
    outcome = hold(behaviour, "fast")
    assert outcome.losses == {"openvino": reason}
    assert outcome.is_lasting == is_lasting
    choice = decide_contest(outcome)
    assert (choice.value, choice.reason) == ("torch", f"openvino cannot run this model here: {reason}")


def test_a_candidate_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PASS_TIMEOUT_SECONDS", 2.0)
    assert hold("fast", "hang").losses == {"torch": "it took more than 2 s"}


def test_batches_are_the_same_at_every_start_and_within_what_the_model_reads() -> None:
    batches = make_batches(replace(CARD, max_tokens=100))
    assert [batch.lengths.tolist() for batch in batches] == [
        batch.lengths.tolist() for batch in make_batches(replace(CARD, max_tokens=100))
    ]
    assert max(batch.max_length for batch in batches) == 100
    assert max(int(batch.input_ids.max()) for batch in batches) < find_vocabulary_size(CARD) == 30522
    assert all(900 < batch.num_tokens < 1200 for batch in batches)
    tokens_of_a_large_model = [b.num_tokens for b in make_batches(replace(CARD, num_parameters=7 * 10**9))]
    assert all(num_tokens <= 128 for num_tokens in tokens_of_a_large_model)


def never() -> NoReturn:
    raise AssertionError("it was measured although an outcome is kept")


def test_an_outcome_is_kept_until_anything_changes_that_it_depends_on(tmp_path: Path) -> None:
    order = replace(ORDER, cache_dir=tmp_path)
    outcome = Outcome(DAY, {"openvino": 2.0, "torch": 1.0})
    assert find_or_measure(order, lambda: outcome, load=0.0) == outcome
    assert find_or_measure(order, never, load=0.0) == outcome
    [path] = (tmp_path / "choices").glob("*.json")
    assert json.loads(path.read_text())["question"]["processor"] == "a processor"
    other = replace(outcome, day="2026-11-22")
    for changed in (
        replace(order, precision="bf16"),
        replace(order, num_threads=2),
        replace(order, card=replace(CARD, revision="other")),
        replace(order, device=replace(DEVICE, description="another processor")),
    ):
        assert find_or_measure(changed, lambda: other, load=0.0) == other
    assert find_or_measure(order, never, load=0.0) == outcome


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"outcome": {}}', '{"outcome": {"day": "x", "tokens_per_second": 1}}']
)
def test_a_damaged_outcome_is_measured_and_written_again(content: str, tmp_path: Path) -> None:
    order = replace(ORDER, cache_dir=tmp_path)
    outcome = Outcome(DAY, {"openvino": 2.0}, {"torch": "it is too old"})
    find_or_measure(order, lambda: outcome, load=0.0)
    [path] = (tmp_path / "choices").glob("*.json")
    path.write_text(content)
    assert find_or_measure(order, lambda: outcome, load=0.0) == outcome
    assert find_or_measure(order, never, load=0.0) == outcome


def test_an_outcome_that_may_not_repeat_is_not_kept(tmp_path: Path) -> None:
    order = replace(ORDER, cache_dir=tmp_path)
    outcome = Outcome(DAY, {"openvino": 2.0}, {"torch": "its process was ended by SIGSEGV"}, is_lasting=False)
    assert find_or_measure(order, lambda: outcome, load=0.0) == outcome
    assert not list((tmp_path / "choices").glob("*.json"))


@pytest.mark.parametrize(
    ("load_then", "load_now", "is_kept"),
    [
        (0.1, 0.0, True),
        (0.4, 0.0, True),  # most of the machine was there
        (2.0, 1.5, True),  # as busy as it was, another contest says no more
        (2.0, 0.9, False),
        (0.6, 0.1, False),
    ],
)
def test_what_was_measured_on_a_busy_machine_holds_until_it_is_half_as_busy(
    load_then: float, load_now: float, is_kept: bool, tmp_path: Path
) -> None:
    order = replace(ORDER, cache_dir=tmp_path)
    busy = Outcome(DAY, {"openvino": 2.0, "torch": 1.0}, load=load_then)
    quiet = Outcome("2026-11-22", {"openvino": 9.0, "torch": 10.0}, load=load_now)
    find_or_measure(order, lambda: busy, load=load_then)
    found = find_or_measure(order, lambda: quiet, load=load_now)
    assert found == (busy if is_kept else quiet)
    assert find_or_measure(order, never, load=load_now) == found


def test_an_outcome_that_an_older_worker_wrote_is_read(tmp_path: Path) -> None:
    order = replace(ORDER, cache_dir=tmp_path)
    outcome = Outcome(DAY, {"openvino": 2.0, "torch": 1.0})
    find_or_measure(order, lambda: outcome, load=0.0)
    [path] = (tmp_path / "choices").glob("*.json")
    content = json.loads(path.read_text())
    del content["outcome"]["load"]
    path.write_text(json.dumps(content))
    assert find_or_measure(order, never, load=0.0) == outcome


def test_of_two_workers_that_start_together_one_measures_and_the_other_waits(tmp_path: Path) -> None:
    order = replace(ORDER, cache_dir=tmp_path)
    is_measuring, may_end = threading.Event(), threading.Event()
    outcome = Outcome(DAY, {"openvino": 2.0, "torch": 1.0})

    def measure() -> Outcome:
        is_measuring.set()
        assert may_end.wait(30)
        return outcome

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(find_or_measure, order, measure, load=0.0)
        assert is_measuring.wait(30)
        second = pool.submit(find_or_measure, order, never, load=0.0)
        may_end.set()
        assert first.result() == second.result() == outcome


def test_a_model_without_memory_for_several_copies_is_not_measured(tmp_path: Path) -> None:
    card = replace(CARD, num_parameters=10**15)
    choice, notes = choose_by_contest(replace(ORDER, card=card, cache_dir=tmp_path))
    assert choice.value == "openvino"
    assert choice.reason.startswith("not measured: measuring needs")
    assert notes == ()
    assert not list((tmp_path / "choices").glob("*.json"))
