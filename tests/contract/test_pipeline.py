"""A pipeline keeps its stages busy as far as its length allows, and hands every micro-batch on in order."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.architecture.sources import ROOT
from tests.contract.pipeline_program import STAGE_SECONDS
from vectormill.settings import process_environment
from worker.parallel.loopback import loopback_environment

Said = list[dict[str, Any]]

# The long one is the last: the stages that are only in it have loaded torch by then.
PIPELINES = [
    (2, 8),  # ideal 11 %
    (2, 1),  # ideal 50 %: layers on two devices, one of them busy
    (4, 16),  # ideal 16 %, as many micro-batches as the planner takes
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Said]:
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
def test_the_bubble_is_that_of_an_ideal_pipeline(
    stages: int, micro_batches: int, said: dict[tuple[int, int], Said]
) -> None:
    last = said[stages, micro_batches][
        -1
    ]  # it is there from the first micro-batch's start to the last one's end
    assert last["values"] == [place + stages - 1 for place in range(micro_batches)]
    assert all(stage["busy"] >= micro_batches * STAGE_SECONDS for stage in said[stages, micro_batches])
    bubble = 1 - last["busy"] / last["wall"]
    ideal = (stages - 1) / (micro_batches + stages - 1)
    assert abs(bubble - ideal) < 0.15, f"{bubble:.2f}, ideal {ideal:.2f}"
