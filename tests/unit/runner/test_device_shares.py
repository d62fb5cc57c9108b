"""How long a batch took, where several are computed side by side."""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.models import DEVICE
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import Encoder, EncoderReport, ForwardPass
from worker.runner.memory import MemoryGauge
from worker.runner.messages import Encode, Encoded, EncodeFailed
from worker.runner.runner_process import BatchRun, DeviceShares

BATCH = Batch.from_ids([np.array([1, 2], dtype=np.int32)])


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
