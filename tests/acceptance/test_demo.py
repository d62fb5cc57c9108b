"""What the README shows of other jobs than the main one, by the commands that it names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.stack import Stack


@pytest.mark.slow  # the whole standard library is encoded once: a minute on two idle cores
@pytest.mark.timeout(900)
def test_the_demo_of_a_re_index_ends_with_the_rows_of_its_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vectormill.cli", "demo", "--reindex", "--json"]
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path / "data")], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    first, changed, unchanged = (run["counts"] for run in report["runs"])
    assert first["num_new"] == first["num_seen"] > 5000
    assert 0 < changed["num_new"] + changed["num_changed"] < changed["num_seen"] / 50
    assert min(changed[f"num_{name}"] for name in ("metadata_only", "moved", "deleted")) > 0
    assert unchanged["num_unchanged"] == unchanged["num_seen"] == changed["num_seen"]
    assert {match["metadata"]["module"] for match in report["search"]} <= {"datetime", "time", "calendar"}
    assert len(report["search"]) == 5


def test_the_demo_of_pairs_scores_a_sentence_higher_with_what_follows_it(stack: Stack) -> None:
    command = [sys.executable, "-m", "vectormill.cli", "demo", "--task", "score", "--items", "60", "--json"]
    done = subprocess.run([*command, "--api-url", stack.api_url], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["num_results"] == report["job"]["num_items"] == 60
    assert report["findings"]["own_scored_higher"] > 0.8
    assert report["findings"]["median_scores"]["own"] > report["findings"]["median_scores"]["other"]


def test_the_demo_of_several_outputs_ends_with_all_of_them_for_each_text(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "vectormill.cli",
        "demo",
        "--outputs",
        "dense,sparse,multi_vector",
        "--json",
    ]
    command += ["--items", "60", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["num_outputs"] == report["job"]["num_items"] == 60
    assert report["job"]["options"]["outputs"] == "dense,sparse,multi_vector"
    assert {len(matches) for matches in report["searches"].values()} == {5}
