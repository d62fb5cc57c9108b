"""The stages of a pipeline work at the same time, and hand every micro-batch on in order."""

import json
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT
from vectormill.settings import process_environment
from worker.parallel.loopback import loopback_environment

# The long one is the last: the stages that are only in it have loaded torch by then.
PIPELINES = [
    (2, 8),
    (2, 1),  # layers on two devices, one of them busy
    (4, 16),  # as many micro-batches as the planner takes
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], list[list[float]]]:
    """What the stages of each pipeline said. The same four processes are all of them: each has to load torch."""
    command = [sys.executable, "-m", "tests.contract.pipeline_program"]
    meeting = str(tmp_path_factory.mktemp("pipelines") / "meeting_point")
    pipelines = [f"{stages}:{micro_batches}" for stages, micro_batches in PIPELINES]
    processes = [
        subprocess.Popen(
            [*command, str(number), meeting, *pipelines],
            env=process_environment() | loopback_environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        for number in range(4)
    ]
    try:
        outputs = [process.communicate(timeout=110)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    lines = [iter(output) for output in outputs]
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
