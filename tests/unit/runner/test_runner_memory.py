"""What a runner says of its memory, and what is left of a batch that failed."""

import gc
import subprocess
import sys
import weakref

import numpy as np

from tests.architecture.sources import ROOT
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory, detect_memory
from worker.devices.device import split_processor
from worker.encoder.encoder import Choice, DirectEncoder, EncoderReport
from worker.runner.memory import PAUSE_SECONDS, MemoryGauge, count_hole_bytes
from worker.runner.messages import Encode, EncodeFailed
from worker.runner.runner_process import BatchRun

DEVICE = split_processor(detect_inventory(), 1)[0]
BATCH = Batch.from_ids([np.arange(5, dtype=np.int32)])


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


def test_memory_that_can_be_had_is_never_more_than_there_is() -> None:
    memory = detect_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert DEVICE.memory_bytes <= memory.total_bytes


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    held = np.ones(400 << 20, dtype=np.uint8)
    program = "from worker.runner.memory import read_peak_bytes; print(read_peak_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert 10 << 20 < int(done.stdout) < held.nbytes
