"""The stages of a pipeline work at the same time, and hand every micro-batch on in order.

A stage's device is done with a micro-batch only when the stages beside it have begun those that they could have
begun by then: a pipeline whose stages do not work at the same time would stand still, and nothing depends on how
fast anything is.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract.ranks import run_ranks
from tests.waiting import wait_for
from worker.parallel.pipeline import PipelineStage
from worker.parallel.rendezvous import join_process_group
from worker.placement.placement import Rank
from worker.placement.strategies import PIPELINE
from worker.runner.starter import LOOPBACK

SHAPE: Final = (4, 16, 32)  # hidden states [n, length, hidden size] of a micro-batch


class Begun:
    """A record, shared between processes as one file a micro-batch, of what each stage has begun."""

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
    """This rank's part in pipelines of (stages, micro-batches), one after the other, unless it is beyond them.

    Leaves what came out of each in `number.jsonl`, a list a line: empty but for the last stage.
    """
    with (folder / f"{number}.jsonl").open("w") as out:
        for place, (world_size, micro_batches) in enumerate(pipelines):
            if number < world_size:
                layers, meeting_point = (1,) * world_size, folder / f"meeting_point-{place}"
                rank = Rank(number, world_size, PIPELINE, layers, micro_batches, meeting_point, 60.0)
                out.write(json.dumps(run_stage(rank, micro_batches)) + "\n")


def run_stage(rank: Rank, micro_batches: int) -> list[float]:
    join_process_group(rank, "gloo")
    begun = Begun(Path(f"{rank.meeting_point}.begun"))

    def compute(place: int, hidden_states: Tensor | None) -> Tensor:
        begun.tell(rank.number, place)
        if not rank.is_first and place + 1 < micro_batches:
            begun.wait_for(rank.number - 1, place + 1)
        if not rank.is_last and place >= 2:
            begun.wait_for(rank.number + 1, place - 2)
        return torch.full(SHAPE, float(place)) if hidden_states is None else hidden_states + 1

    stage = PipelineStage(rank, torch.float32, torch.device("cpu"))
    results = stage.run([SHAPE] * micro_batches, compute)
    values = [float(result.mean()) for result in results]
    dist.barrier()  # nobody leaves while another still waits for what it sent
    dist.destroy_process_group()
    return values


PIPELINES = [
    (2, 8),
    (2, 1),  # layers on two devices, one of them busy
    (4, 16),  # as many micro-batches as the planner takes
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], list[list[float]]]:
    """What the stages of each pipeline said. The same four processes are all of them."""
    folder = tmp_path_factory.mktemp("pipelines")
    run_ranks(run_stages, [(number, folder, PIPELINES) for number in range(4)], LOOPBACK)
    lines = [iter((folder / f"{number}.jsonl").read_text().splitlines()) for number in range(4)]
    return {
        (stages, micro_batches): [json.loads(next(lines[number])) for number in range(stages)]
        for stages, micro_batches in PIPELINES
    }


@pytest.mark.parametrize(("stages", "micro_batches"), PIPELINES)
def test_all_stages_work_at_once_and_hand_on_every_micro_batch_in_order(
    stages: int, micro_batches: int, said: dict[tuple[int, int], list[list[float]]]
) -> None:
    *others, last = said[stages, micro_batches]
    assert last == [place + stages - 1 for place in range(micro_batches)]
    assert not any(others)
