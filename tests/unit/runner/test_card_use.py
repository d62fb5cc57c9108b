"""Several processes on one GPU learn how many of them are busy, and each counts its own share of the time."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CUDA, Device, divide_gpu
from worker.encoder.encoder import Encoder, EncoderOrder, EncoderReport, ForwardPass
from worker.runner.card_use import FOLDER, CardUse
from worker.runner.memory import MemoryGauge
from worker.runner.messages import Encode, Encoded
from worker.runner.runner_process import BatchRun, _watch_card

CARD = "GPU-1/0"
COMPUTE = f"""
import sys
from pathlib import Path
from worker.runner.card_use import CardUse
use = CardUse(Path(sys.argv[1]), {CARD!r})
for line in sys.stdin:
    print(use.enter() if line == "enter\\n" else use.leave(), flush=True)
"""


class Neighbour:
    """Another process on the same GPU."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMPUTE, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, word: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_the_processes_that_have_batches_on_a_gpu_share_its_time_until_they_end_in_whatever_way(
    tmp_path: Path,
) -> None:
    own, neighbours = CardUse(tmp_path, CARD), [Neighbour(tmp_path) for _ in range(3)]
    first, second, third = neighbours
    try:
        assert own.enter() == own.leave() == 1
        assert [first.say("enter"), second.say("enter"), third.say("enter")] == [1, 1 / 2, 1 / 3]
        assert own.enter() == 1 / 4
        assert own.enter() == first.say("enter") == 1 / 4, "a second batch takes no further share"
        assert first.say("leave") == own.leave() == 1 / 4
        assert first.say("leave") == 1 / 4
        assert second.say("leave") == 1 / 3
        assert own.leave() == 1 / 2
        third.kill()
        assert own.enter() == 1
        assert CardUse(tmp_path, "another").enter() == 1
    finally:
        for each in neighbours:
            each.kill()


class Pass:
    """Takes the device's time that is left when its results are wanted."""

    def __init__(self, worker: "FakeWorker") -> None:
        self.worker = worker

    def start(self) -> None: ...

    def results(self) -> Ragged:
        self.worker.now += self.worker.seconds
        return Ragged.from_matrix(np.zeros((1, 1), np.float32))


class FakeWorker(Encoder):
    """One of several workers on a GPU that computes for each of them in turn; it is also the share that it has."""

    def __init__(self, alone_seconds: float, num_busy: int) -> None:
        self.now, self.seconds, self.num_busy = 0.0, alone_seconds * num_busy, num_busy

    def prepare(self, batch: Batch) -> ForwardPass:
        return Pass(self)

    def describe(self) -> EncoderReport:
        raise AssertionError("a loop over batches does not ask for a description")

    def enter(self) -> float:
        return 1 / self.num_busy

    leave = enter


@given(st.lists(st.floats(0.001, 2), min_size=1, max_size=8))
def test_the_seconds_of_all_workers_are_those_in_which_their_gpu_computed(alone_seconds: list[float]) -> None:
    found = []
    for seconds in alone_seconds:
        worker = FakeWorker(seconds, len(alone_seconds))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda worker=worker: worker.now)
            message = Encode(1, Batch.from_ids([np.arange(5, dtype=np.int32)]), is_urgent=False)
            run = BatchRun(message, worker, use=worker)  # type: ignore[arg-type]
            run.start()
            gauge = MemoryGauge(Device("cpu", "cpu", 0, (), 1, 1), clock=lambda: 0.0)
            outcome = run.finish(gauge, device_free_at=0.0)
        assert isinstance(outcome, Encoded)
        assert outcome.seconds == pytest.approx(seconds * len(alone_seconds)), "as a clock on the wall says"
        found.append(outcome.seconds * outcome.share)
    assert found == pytest.approx(alone_seconds)


def test_only_parts_of_a_gpu_are_watched_and_they_watch_the_same_file(tmp_path: Path) -> None:
    whole = Device("cuda:0", CUDA, 0, (), 8, 1 << 30, uuid="GPU-1")
    order = EncoderOrder(cast(ModelCard, None), whole, "torch", "auto", 1, tmp_path, "auto")
    assert _watch_card(order) is None
    for part in divide_gpu(whole, 2):
        assert _watch_card(replace(order, device=part)) is not None
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["GPU-1"]
    (tmp_path / "file").touch()
    without = replace(order, device=part, cache_dir=tmp_path / "file")
    assert _watch_card(without) is None, "a folder that cannot be written costs the share, not the model"
