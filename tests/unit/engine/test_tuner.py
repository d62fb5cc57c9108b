"""What the tuner makes of a loaded model, its memory and the outcomes of its batches."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import read_card
from tests.rexuninlu import GOLDEN
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.batching.batch import Batch, OwnedBatch, Sequences
from worker.batching.cost import BatchCost
from worker.batching.pool import BatchLimits, SequencePool
from worker.devices.device import CPU, CUDA, Device
from worker.encoder.encoder import Choice, EncoderReport
from worker.engine.engine import Engine
from worker.engine.tuner import (
    LEAST_SHARE,
    LEAST_TOKENS_IN_FLIGHT,
    BatchMemory,
    Tuner,
    choose_tokens_in_flight,
    find_batch_cost,
)
from worker.placement.placement import Replica, Shard, Stage
from worker.placement.strategies import FULLY_SHARDED, PIPELINE, TENSOR
from worker.runner.memory import MemoryReport, join_reports
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
GIB = 1 << 30


def make_tuner(
    kind: str = CPU, memory_bytes: int = 16 * GIB, query_timeout_seconds: float = math.inf
) -> Tuner:
    device = Device(f"{kind}:0", kind, 0, (), 2, memory_bytes, description="a device")
    return Tuner(CARD, device, WorkerSettings(), query_timeout_seconds=query_timeout_seconds)


def report(
    precision: str = "fp32", attention: str = "padded (sdpa)", *, is_packed: bool = False
) -> EncoderReport:
    choice = Choice(precision, "requested")
    return EncoderReport(choice, Choice("torch", "requested"), choice, attention, 2, 0.0, (), is_packed)


def memory(used_share: float) -> MemoryReport:
    return MemoryReport(300 << 20, 400 << 20, 0, used_share)


def make_work(num_sequences: int, length: int, *, is_urgent: bool = False) -> OwnedBatch:
    rows = [np.arange(length, dtype=np.int32)] * num_sequences
    lengths = np.full(num_sequences, length, np.int32)
    sequences = Sequences(
        np.zeros(num_sequences, np.int64),
        np.arange(num_sequences, dtype=np.int32),
        lengths,
        lengths.astype(np.float64),
    )
    return OwnedBatch(sequences, Batch.from_ids(rows), is_urgent)


@pytest.mark.parametrize(
    ("kind", "memory_bytes", "used_share", "tokens"),
    [
        (CPU, 16 * GIB, 0.3, 1024),  # where a CPU starts
        (CUDA, 80 * GIB, 0.1, 2048),  # where a GPU starts
        (CUDA, GIB, 0.86, 12 * 128),  # 43 MB below the high watermark, without 16 MB, at 17 kB a token
        (CPU, 16 * GIB, 0.95, 256),  # nothing is left, and nothing would stand still
    ],
)
def test_the_first_batches_are_no_larger_than_the_free_memory_holds(
    kind: str, memory_bytes: int, used_share: float, tokens: int
) -> None:
    tuner = make_tuner(kind, memory_bytes)
    tuner.begin(report(), memory(used_share), BatchCost())
    assert tuner.max_batch_tokens(128) == tokens


def test_a_precision_that_is_not_known_does_not_stop_the_worker() -> None:
    tuner = make_tuner()
    tuner.begin(report("some new precision"), memory(0.1), BatchCost())
    assert tuner.max_batch_tokens(128) == 1024


def test_out_of_memory_is_said_once_counted_always_and_forgotten_with_the_encoder(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tuner = make_tuner()
    tuner.begin(report(), memory(0.1), BatchCost())
    for num_sequences in (16, 8, 4):
        tuner.observe_out_of_memory(make_work(num_sequences, 128), "can't allocate memory")
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "16 sequences of up to 128 tokens (can't allocate memory)" in said[0].getMessage()
    assert tuner.describe()["num_out_of_memory"] == 3
    tuner.begin(report(), memory(0.1), BatchCost())
    assert tuner.max_batch_tokens(128) == 256, "a process that was started again is no other encoder"
    tuner.begin(report("bf16"), memory(0.1), BatchCost())
    assert tuner.max_batch_tokens(128) == 1024, "another precision needs other memory"


def test_a_batch_that_is_too_large_halves_the_batches_of_that_length() -> None:
    tuner = make_tuner()
    tuner.begin(report(), memory(0.1), BatchCost())
    tuner.observe_out_of_memory(make_work(4, 128), "the kernel killed it")
    assert (tuner.max_batch_tokens(128), tuner.max_batch_tokens(30)) == (256, 1024)


def test_urgent_batches_which_are_short_on_purpose_teach_nothing() -> None:
    tuner = make_tuner()
    tuner.begin(report(), memory(0.1), BatchCost())
    for _ in range(100):
        tuner.observe_encoded(make_work(64, 32, is_urgent=True), 0.01, None)
    assert tuner.describe()["budgets"]["up to 64"]["tokens_per_second"] == 0


@pytest.mark.parametrize(("num_parts", "tokens"), [(1, 4096), (4, 1024)])
def test_a_query_waits_for_batches_of_all_workers_that_share_a_gpu(num_parts: int, tokens: int) -> None:
    device = Device("cuda:0", CUDA, 0, (), 2, 80 * GIB, num_parts=num_parts)
    tuner = Tuner(CARD, device, WorkerSettings(), query_timeout_seconds=6)
    tuner.begin(report(), memory(0.1), BatchCost())
    for _ in range(2):
        # With two before it, a query is answered after 2.7 s, or after 10.8 s.
        tuner.observe_encoded(make_work(2048 // 32, 32), 0.9, None)
    assert tuner.max_batch_tokens(32) == tokens


def test_full_batches_are_known_as_such_whatever_a_long_text_costs() -> None:
    tuner = make_tuner()
    cost = BatchCost(quadratic_length=256, pads=False)
    tuner.begin(report(attention="packed (vectormill_varlen)", is_packed=True), memory(0.1), cost)
    # Another one would cost 256 * (1 + 1) = 512, and 768 of 1,024 are taken.
    tuner.observe_encoded(make_work(3, 256), 0.1, None)
    assert tuner.describe()["budgets"]["up to 256"]["tokens_per_second"] == 7680


def test_the_report_has_the_memory_of_the_process_and_shrinks_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tuner = make_tuner()
    tuner.begin(report(), memory(0.1), BatchCost())
    tuner.observe_encoded(make_work(4, 32), 0.1, memory(0.95))
    described = tuner.describe()
    assert (described["memory_bytes"], described["peak_memory_bytes"]) == (300 << 20, 400 << 20)
    assert (described["memory_used_share"], described["num_budget_shrinks"]) == (0.95, 1)
    assert described["max_batch_tokens"] == 512
    assert "95 % of the memory of cpu:0 is in use" in caplog.text


def test_the_batches_of_a_shared_model_grow_like_those_of_a_single_device(tmp_path: Path) -> None:
    devices = tuple(Device(f"cuda:{n}", CUDA, n, (), 2, GIB, description="a device") for n in range(2))
    stages = tuple(Stage(3 * n, 3, (Shard(device.name, GIB, 0, 0),)) for n, device in enumerate(devices))
    sharing = Sharing(Replica(PIPELINE, stages, 1 << 20, 1.0), devices)
    for chosen, state in ((WorkerSettings(), "tuning"), (WorkerSettings(max_batch_tokens=512), "fixed")):
        alone, shared = (
            Engine(CARD, devices[0], chosen, tmp_path, sharing=each)._tuner.describe()["budgets"]
            for each in (None, sharing)
        )
        assert shared == alone
        assert {budget["state"] for budget in shared.values()} == {state}


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (TENSOR, 1),  # every device has the whole batch
        (FULLY_SHARDED, 2),  # each has its half
        (PIPELINE, 1),  # a stage has one batch after another
    ],
)
def test_batches_of_a_shared_model_obey_its_fullest_device(strategy: str, parts: int) -> None:
    devices = tuple(Device(f"cpu:{n}", CPU, n, (), 2, 4 * GIB, description="a device") for n in range(2))
    shards = tuple(Shard(device.name, GIB, 0, 0) for device in devices)
    stages: tuple[Stage, ...] = (Stage(0, 6, shards),)
    if strategy == PIPELINE:
        stages = (Stage(0, 3, shards[:1]), Stage(3, 3, shards[1:]))
    sharing = Sharing(Replica(strategy, stages, 1 << 20, 1.0), devices)
    settings = WorkerSettings(max_batch_tokens=1 << 20)
    tuner = Tuner(CARD, devices[0], settings, sharing)
    tuner.begin(report(), join_reports([memory(0.2), memory(0.8)]), BatchCost())
    # A tenth of the second device is left below the high watermark.
    _, fullest = BatchMemory(CARD, report(), devices, sharing.replica).footprints
    assert tuner.max_batch_tokens(128) == parts * fullest.largest_batch_tokens(int(0.1 * 4 * GIB), 128)
    assert tuner.max_batch_tokens(128) > 128 * 128
    described = tuner.describe()
    assert [rank["device"] for rank in described["memory_of_ranks"]] == ["cpu:0", "cpu:1"]
    assert described["memory_used_share"] == 0.8


@pytest.mark.parametrize(
    ("batch_tokens", "num_started", "pads", "wanted"),
    [
        (1024, 2, True, LEAST_TOKENS_IN_FLIGHT),  # a CPU: chunks to claim, encode and commit side by side
        (32_768, 1, False, 8 * 32_768),
        (32_768, 2, False, 16 * 32_768),  # one computed, one queued behind it
        (32_768, 1, True, 32 * 32_768),  # to choose like lengths from
        (1 << 20, 1 << 10, True, (1 << 31) - 1),  # Postgres keeps it in an integer
    ],
)
def test_a_worker_asks_for_full_batches(batch_tokens: int, num_started: int, pads: bool, wanted: int) -> None:
    assert choose_tokens_in_flight(batch_tokens, num_started, pads=pads) == wanted


def test_an_extraction_is_costed_by_its_squares_and_bounded_by_what_they_take() -> None:
    card, loaded = read_card(GOLDEN / "model"), report(attention="padded (disentangled, by sequence)")
    cost = find_batch_cost(card, loaded)
    assert cost.holds_squares
    predicted = BatchMemory(card, loaded, [Device("cpu:0", CPU, 0, (), 1, 1 << 30)], None)
    (footprint,) = predicted.footprints
    free_bytes = 1 << 30
    pool = SequencePool(BatchLimits(1024), cost)
    pool.budget = predicted.bound([free_bytes])
    for length in (64, 512):
        pool.add(length, [length] * 100_000)
        batch = pool.take_batch()
        pool.remove(length)
        assert footprint.predict_batch_bytes(len(batch), length) <= free_bytes
        # Each pair of tokens costs its distance, its mask and its logit, over all sequences.
        assert len(batch) * length**2 * (8 + 1 + 4) <= free_bytes


@dataclass
class MeasuredDevices:
    """A model on two devices: batches on the second take `factor` times what is predicted, and `more`.

    A report has the peak since the last one, and that of a batch which is queued.
    """

    factor: float
    more: int
    is_told: list[bool]  # for one batch after another, whether it brings a report
    num_ended: int = 0
    begun: tuple[OwnedBatch, str] | None = None

    def __post_init__(self) -> None:
        devices = tuple(Device(f"cuda:{n}", CUDA, n, (), 2, 4 * GIB) for n in range(2))
        stages = tuple(Stage(3 * n, 3, (Shard(device.name, GIB, 0, 0),)) for n, device in enumerate(devices))
        replica = Replica(PIPELINE, stages, 1, 1.0)
        settings = WorkerSettings(max_batch_tokens=1 << 24)
        self.tuner = Tuner(CARD, devices[0], settings, Sharing(replica, devices))
        self.tuner.begin(report(), join_reports([memory(0.5), memory(0.5)]), BatchCost())
        self.needs = BatchMemory(CARD, report(), devices, replica).footprints
        self.free_bytes = int((0.9 - 0.5) * 4 * GIB)
        self.peaks = [0.0, 0.0]

    def bound(self, factor: float, more: float = 0) -> int:
        """Return the bound by memory if the second device takes so much."""
        first, second = self.needs
        left = int((self.free_bytes - more) / factor)
        return min(
            first.largest_batch_tokens(self.free_bytes, LENGTH), second.largest_batch_tokens(left, LENGTH)
        )

    def run(self, num_sequences: int, length: int, outcome: str = "encoded") -> None:
        """Begin a batch, and then end the one before: this one was queued behind it."""
        share = 0.9 if outcome == "exhausted" else 1.0  # what was allocated when the next bytes were refused
        taken = [share * need.predict_batch_bytes(num_sequences, length) for need in self.needs]
        taken[1] = self.factor * taken[1] + self.more
        self.peaks = [max(pair) for pair in zip(self.peaks, taken, strict=True)]
        ending, self.begun = self.begun, (make_work(num_sequences, length), outcome)
        if ending is None:
            return
        self.num_ended += 1
        work, outcome = ending
        self.tuner.note(work.batch)
        if outcome == "encoded":
            told = None
            if self.is_told[self.num_ended % len(self.is_told)]:
                ranks = [
                    replace(memory(0.5), device_bytes=int(need.weight_bytes + peak))
                    for need, peak in zip(self.needs, self.peaks, strict=True)
                ]
                told, self.peaks = join_reports(ranks), taken
            self.tuner.observe_encoded(work, 0.1, told)


LENGTH = 128
ENDED = st.tuples(
    st.integers(0, 12).map(lambda power: 1 << power),
    st.integers(1, 256),
    st.sampled_from(["encoded", "encoded", "exhausted", "known text"]),
)


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(ENDED, max_size=30),
    factor=st.sampled_from([0.5, 1.0, 1.3, 2.5]),
    more=st.sampled_from([0, 17_500_000]),
    is_told=st.lists(st.booleans(), min_size=1, max_size=5).filter(any),
)
def test_batches_are_bounded_by_what_large_ones_took_whatever_has_failed_or_was_small(
    batches: list[tuple[int, int, str]], factor: float, more: int, is_told: list[bool]
) -> None:
    """A failed batch, known texts and small batches correct nothing; full ones do, until others take less."""
    devices = MeasuredDevices(factor, more, is_told)
    before = devices.tuner.max_batch_tokens(LENGTH)
    assert before == devices.bound(1.0)
    for num_sequences, length, outcome in batches:
        devices.run(num_sequences, length, outcome)
        # A constant need is at most this share of the smallest batch that may correct a prediction.
        least = devices.bound(max(1.0, factor + more / (LEAST_SHARE * devices.free_bytes)))
        assert least - LENGTH <= devices.tuner.max_batch_tokens(LENGTH) <= before
    for _ in range(30):
        devices.run(devices.tuner.max_batch_tokens(LENGTH) // LENGTH, LENGTH)
    at_last = devices.tuner.max_batch_tokens(LENGTH)
    assert at_last <= 1.05 * devices.bound(max(1.0, factor), more) + 2 * LENGTH, (
        "what full batches took is known"
    )
    devices.factor, devices.more = 1.0, 0
    for _ in range(60 * len(is_told)):
        devices.run(devices.tuner.max_batch_tokens(LENGTH) // LENGTH, LENGTH)
    assert devices.tuner.max_batch_tokens(LENGTH) > at_last or at_last > before - 2 * LENGTH
