"""A pipeline keeps its stages busy as far as its length allows, and hands every micro-batch on in order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.contract.pipeline_program import STAGE_SECONDS
from vectormill.settings import process_environment
from worker.parallel.loopback import loopback_environment


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [
        (2, 8),  # ideal 11 %
        (4, 16),  # ideal 16 %, as many micro-batches as the planner takes
        (2, 1),  # ideal 50 %: layers on two devices, one of them busy
    ],
)
def test_the_bubble_is_that_of_an_ideal_pipeline(stages: int, micro_batches: int, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.contract.pipeline_program"]
    arguments = [str(stages), str(micro_batches), str(tmp_path / "meeting_point")]
    ranks = [
        subprocess.Popen(
            [*program, str(number), *arguments],
            env=process_environment() | loopback_environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        for number in range(stages)
    ]
    said = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    last = said[-1]  # it is there from the first micro-batch's start to the last one's end
    assert last["values"] == [place + stages - 1 for place in range(micro_batches)]
    assert all(stage["busy"] >= micro_batches * STAGE_SECONDS for stage in said)
    bubble = 1 - last["busy"] / last["wall"]
    ideal = (stages - 1) / (micro_batches + stages - 1)
    assert abs(bubble - ideal) < 0.15, f"{bubble:.2f}, ideal {ideal:.2f}"
