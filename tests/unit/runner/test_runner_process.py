"""How long a batch took, what is left of one that failed, and what is said of memory and of the kernel's kills."""

import gc
import subprocess
import sys
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from tests.architecture.sources import ROOT
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import Choice, DirectEncoder, Encoder, EncoderReport, ForwardPass
from worker.runner.memory import PAUSE_SECONDS, MemoryGauge, count_hole_bytes
from worker.runner.messages import Encode, Encoded, EncodeFailed
from worker.runner.runner_process import BatchRun, DeviceShares

DEVICE = split_processor(detect_inventory(), 1)[0]
BATCH = Batch.from_ids([np.arange(5, dtype=np.int32)])


def test_a_stream_that_computes_alone_has_the_whole_device_whatever_others_could_do() -> None:
    now = 10.0
    shares = DeviceShares(lambda: now)
    begun = shares.enter()
    now = 12.0
    assert shares.leave() - begun == 2.0


def test_streams_side_by_side_share_the_time_and_together_have_all_of_it() -> None:
    now = 0.0
    shares = DeviceShares(lambda: now)
    first = shares.enter()
    now = 1.0  # alone so far
    second = shares.enter()
    now = 3.0  # two seconds together
    first_seconds = shares.leave() - first
    now = 4.0  # the second alone
    second_seconds = shares.leave() - second
    assert (first_seconds, second_seconds) == (2.0, 2.0)
    now = 9.0  # nobody
    third = shares.enter()
    now = 9.5
    assert shares.leave() - third == 0.5


@dataclass
class Pass:
    """Computes by itself from its start on; the clock is the device's."""

    device: "SelfRunning"

    def start(self) -> None:
        if self.device.is_broken:
            raise RuntimeError("no request is left")

    def results(self) -> Ragged:
        self.device.now += 2.0
        return Ragged.from_matrix(np.zeros((1, 1), dtype=np.float32))


class SelfRunning(Encoder):
    def __init__(self) -> None:
        self.now = 0.0
        self.is_broken = False

    def prepare(self, batch: Batch) -> ForwardPass:
        return Pass(self)

    def describe(self) -> EncoderReport:
        raise NotImplementedError  # a stream asks its encoder for forward passes alone


def test_a_batch_takes_from_its_start_on_whatever_its_stream_does_before_it_waits() -> None:
    encoder = SelfRunning()
    shares = DeviceShares(lambda: encoder.now)
    run = BatchRun(Encode(1, BATCH, is_urgent=False), encoder, shares)
    encoder.now = 5.0  # it waits for its turn
    run.start()
    encoder.now += 1.0  # the outcome of the batch before is sent
    outcome = run.finish(MemoryGauge(DEVICE), device_free_at=0.0)
    assert isinstance(outcome, Encoded)
    assert outcome.seconds == 3.0


def test_a_batch_that_could_not_be_started_takes_no_share_from_others() -> None:
    encoder = SelfRunning()
    shares = DeviceShares(lambda: encoder.now)
    encoder.is_broken = True
    failed = BatchRun(Encode(1, BATCH, is_urgent=False), encoder, shares)
    failed.start()
    assert isinstance(failed.finish(MemoryGauge(DEVICE), device_free_at=0.0), EncodeFailed)
    encoder.is_broken = False
    run = BatchRun(Encode(2, BATCH, is_urgent=False), encoder, shares)
    run.start()
    outcome = run.finish(MemoryGauge(DEVICE), device_free_at=0.0)
    assert isinstance(outcome, Encoded)
    assert outcome.seconds == pytest.approx(2.0), "and not half of it"


class Tensor:
    """Stands for what the frames of a failed forward pass hold."""


class ExhaustedEncoder(DirectEncoder):
    def __init__(self) -> None:
        self.held: weakref.ref[Tensor] | None = None

    def encode(self, batch: Batch) -> Ragged:
        tensor = Tensor()
        self.held = weakref.ref(tensor)
        raise RuntimeError("std::bad_alloc")

    def describe(self) -> EncoderReport:
        choice = Choice("fake", "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0)


def test_what_the_failed_batch_held_is_free_before_the_next_one_is_tried() -> None:
    encoder = ExhaustedEncoder()
    gc.disable()  # it shall not need the collector
    try:
        run = BatchRun(Encode(1, BATCH, is_urgent=False), encoder)
        run.start()
        outcome = run.finish(MemoryGauge(DEVICE), device_free_at=0.0)
        assert encoder.held is not None
        assert encoder.held() is None
    finally:
        gc.enable()
    assert outcome == EncodeFailed(1, "RuntimeError: std::bad_alloc", is_out_of_memory=True)


def test_memory_is_asked_for_at_most_four_times_a_second() -> None:
    now = 0.0
    gauge = MemoryGauge(DEVICE, clock=lambda: now)
    first = gauge.read()
    assert first is not None
    assert first.peak_process_bytes >= first.process_bytes > 1 << 20
    assert first.device_bytes == 0, "a processor has no memory of its own"
    assert 0 < first.used_share < 1
    assert gauge.read() is None
    now = PAUSE_SECONDS
    assert gauge.read() is not None


def test_holes_in_segments_that_are_in_use_are_not_free_and_whole_segments_are() -> None:
    segments = [
        {"total_size": 100, "allocated_size": 30, "is_expandable": False},
        {
            "total_size": 100,
            "allocated_size": 0,
            "is_expandable": False,
        },  # goes back when memory is asked for
        {"total_size": 100, "allocated_size": 10, "is_expandable": True},  # part by part
    ]
    assert count_hole_bytes(segments) == 70


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    held = np.ones(400 << 20, dtype=np.uint8)
    program = "from worker.runner.memory import read_peak_bytes; print(read_peak_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert 10 << 20 < int(done.stdout) < held.nbytes
