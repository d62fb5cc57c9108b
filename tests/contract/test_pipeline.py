"""The stages of a pipeline work at the same time, and hand every micro-batch on in order."""

import json

import pytest

from tests.contract.pipeline_program import run_stages
from tests.contract.ranks import run_ranks
from worker.runner.starter import LOOPBACK

pytestmark = pytest.mark.tail

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
