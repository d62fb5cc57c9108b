"""`python -m benchmarks gpu --device cpu --quick`: every step for once, with tiny models and the real engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases.gpu.plan import QUICK
from benchmarks.cases.gpu.state import DONE, RECORDS
from vectormill.settings import process_environment

ROOT = Path(__file__).resolve().parents[4]


def run(directory: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "gpu",
        "--device",
        "cpu",
        "--quick",
        "--state",
        str(directory),
    ]
    return subprocess.run(
        command, cwd=ROOT, env=process_environment(), capture_output=True, text=True, timeout=1200
    )


@pytest.mark.slow
@pytest.mark.timeout(2500)  # a minute or two of processor time, most of it starting processes
def test_a_quick_hour_on_a_processor_goes_through_every_step_and_then_has_nothing_left(
    tmp_path: Path,
) -> None:
    first = run(tmp_path)
    assert first.returncode == 0, first.stderr
    records = [json.loads(line) for line in (tmp_path / RECORDS).read_text(encoding="utf-8").splitlines()[1:]]
    assert records
    assert {record["step"]: record["reason"] for record in records if record["outcome"] != DONE} == {}
    by_step = {record["step"]: record["result"] for record in records}
    trial = by_step["switch tiny fused_qkv"]
    assert trial["attention"].startswith("packed")
    assert [len(timed["seconds"]) for timed in trial["by_length"].values()] == [QUICK.repeat] * 2
    assert by_step["tests"]["counts"]["passed"] > 0
    assert set(by_step["budgets tiny"]["rates"]) == {str(size) for size in QUICK.budget_sizes}
    assert by_step["budgets tiny"]["tuner"]["max_batch_tokens"] > 0
    assert set(by_step["beside tiny"]["systems"]) == {"engine", *QUICK.others}
    assert all(system["seconds"] for system in by_step["beside tiny"]["systems"].values())
    again = run(tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done before, in") == len(records)
