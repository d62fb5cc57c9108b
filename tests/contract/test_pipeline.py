"""The stages of a pipeline work at the same time, each on another batch, and hand every batch on in order.

A stage's device is done with a batch only when the stages beside it have begun those that they could have begun by
then: a pipeline whose stages do not work at the same time would stand still, and nothing depends on how fast
anything is.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract.ranks import run_ranks
from tests.models import DEVICE
from tests.waiting import wait_for
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import DirectEncoder
from worker.parallel.agreement import join_process_group
from worker.parallel.pipeline import PipelineStage
from worker.placement.placement import Rank
from worker.placement.strategies import PIPELINE
from worker.runner.memory import MemoryGauge
from worker.runner.messages import Encode, Encoded
from worker.runner.runner_process import BatchRun
from worker.runner.starter import LOOPBACK

SHAPE: Final = (4, 16, 32)  # hidden states [n, length, hidden size] of a batch
NUM_SLOW: Final = 3  # batches of a pipeline with a slow stage
SLOW_SECONDS: Final = 0.5


class Begun:
    """A record, shared between processes as one file a batch, of what each stage has begun."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def tell(self, stage: int, place: int) -> None:
        (self._folder / f"{stage}-{place}").touch()

    def wait_for(self, stage: int, place: int) -> None:
        wait_for(
            (self._folder / f"{stage}-{place}").exists, 60, f"stage {stage} works on {place} at the same time"
        )


def run_stages(number: int, folder: Path, pipelines: Sequence[tuple[int, int]]) -> None:
    """This rank's part in pipelines of (stages, batches), one after the other, unless it is beyond them, and in
    pipelines of three stages of which one is slow.

    Leaves what came out of each in `number.jsonl`, a list a line: empty but for the last stage, and then its seconds.
    """
    with (folder / f"{number}.jsonl").open("w") as out:
        for place, (world_size, num_batches) in enumerate(pipelines):
            if number < world_size:
                said = run_rank(number, world_size, folder / f"meeting_point-{place}", num_batches, run_stage)
                out.write(json.dumps(said) + "\n")
        for slow in range(3):
            if number < 3:
                spend = partial(spend_seconds, SLOW_SECONDS if number == slow else 0.0)
                said = run_rank(number, 3, folder / f"meeting_point-slow-{slow}", NUM_SLOW, spend)
                out.write(json.dumps(said) + "\n")


def run_rank(
    number: int,
    world_size: int,
    meeting_point: Path,
    num_batches: int,
    run: Callable[[Rank, PipelineStage, int], list[float]],
) -> list[float]:
    rank = Rank(number, world_size, PIPELINE, (1,) * world_size, meeting_point, 60.0)
    join_process_group(rank, "gloo")
    stage = PipelineStage(rank, torch.float32, torch.device("cpu"))
    said = run(rank, stage, num_batches)
    dist.barrier()  # nobody leaves while another still waits for what it sent
    dist.destroy_process_group()
    return said


def run_stage(rank: Rank, stage: PipelineStage, num_batches: int) -> list[float]:
    begun = Begun(Path(f"{rank.meeting_point}.begun"))

    def compute(place: int, hidden_states: Tensor | None) -> Tensor:
        begun.tell(rank.number, place)
        if not rank.is_first and place + 1 < num_batches:
            begun.wait_for(rank.number - 1, place + 1)
        if not rank.is_last and place >= 2:
            begun.wait_for(rank.number + 1, place - 2)
        return torch.full(SHAPE, float(place)) if hidden_states is None else hidden_states + 1

    results = [stage.run(SHAPE, partial(compute, place)) for place in range(num_batches)]
    return [float(result.mean()) for result in results if result is not None]


class SpendingStage(DirectEncoder):
    """A stage that takes so many seconds for a batch."""

    def __init__(self, stage: PipelineStage, seconds: float) -> None:
        self._stage, self._seconds = stage, seconds
        self.take_waited_seconds = stage.take_waited_seconds  # type: ignore[method-assign]

    def encode(self, batch: Batch) -> Ragged:
        self._stage.run(SHAPE, self._compute)
        return Ragged.from_rows([], np.float32)

    def _compute(self, hidden_states: Tensor | None) -> Tensor:
        time.sleep(self._seconds)  # stands for a slow device, whose time is what the test compares
        return torch.zeros(SHAPE)


def spend_seconds(seconds: float, rank: Rank, stage: PipelineStage, num_batches: int) -> list[float]:
    """Return the seconds that a runner reports of each batch, as it counts them."""
    encoder, gauge, said = SpendingStage(stage, seconds), MemoryGauge(DEVICE), []
    for number in range(num_batches):
        run = BatchRun(Encode(number, Batch.from_ids([np.ones(4, np.int32)]), False), encoder)
        run.start()
        outcome = run.finish(gauge, 0.0)
        assert isinstance(outcome, Encoded)
        said.append(outcome.seconds)
    return said


PIPELINES = [
    (2, 8),
    (2, 1),  # layers on two devices, one of them busy
    (4, 16),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float]]]:
    """Return the answers of four processes, which are the stages of every pipeline."""
    folder = tmp_path_factory.mktemp("pipelines")
    run_ranks(run_stages, [(number, folder, PIPELINES) for number in range(4)], LOOPBACK)
    texts = [(folder / f"{number}.jsonl").read_text() for number in range(4)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


@pytest.mark.parametrize(("stages", "num_batches"), PIPELINES)
def test_all_stages_work_at_once_and_hand_on_every_batch_in_order(
    stages: int, num_batches: int, said: list[list[list[float]]]
) -> None:
    place = PIPELINES.index((stages, num_batches))
    own = [sum(world_size > number for world_size, _ in PIPELINES[:place]) for number in range(stages)]
    *others, last = (said[number][own[number]] for number in range(stages))
    assert last == [number + stages - 1 for number in range(num_batches)]
    assert not any(others)


@pytest.mark.parametrize("slow", range(3))
def test_a_stage_does_not_count_the_time_in_which_it_waits_for_a_slower_one(
    slow: int, said: list[list[list[float]]]
) -> None:
    seconds = [sum(said[number][-3 + slow]) for number in range(3)]
    assert seconds[slow] >= NUM_SLOW * SLOW_SECONDS
    assert all(spent < seconds[slow] / 2 for number, spent in enumerate(seconds) if number != slow), seconds
