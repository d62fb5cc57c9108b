"""What the README shows of other jobs than the main one, by the commands that it names."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.stack import Stack
from tests.integration.cli.test_models_command import COMMAND, LAYOUTS, WITHOUT_TORCH, run_with_hub
from tests.unit.deployment.test_hub import serving_hub


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
    assert min(changed[f"num_{name}"] for name in ("metadata_only", "deleted")) > 0
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arguments", "hub_name"),
    [
        (("--outputs", "dense,sparse,multi_vector"), "BAAI/bge-m3"),
        pytest.param(("--task", "extract"), "urchade/gliner_small-v2.1", marks=pytest.mark.slow),
    ],
)
def test_a_demo_of_what_the_packaged_model_lacks_runs_after_the_commands_that_it_says(
    arguments: tuple[str, str], hub_name: str, tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    model = LAYOUTS[hub_name](tmp_path / "made" / hub_name.partition("/")[2])
    with serving_hub(model) as (hub, _):
        environment = hub | {f"VECTORMILL_{name}_DIR": str(tmp_path / name) for name in ("DATA", "CACHE")}

        def run(*argv: str) -> subprocess.CompletedProcess[str]:
            # The conversion of a model that the hub has in another form writes into the folder in which it is run.
            return run_with_hub(argv, tmp_path / "home", environment, tmp_path / "made")

        refused = run(*COMMAND, "demo", *arguments)
        assert refused.returncode == 2
        *_, add, again = (
            shlex.split(told)[1:] for told in re.findall("`(vectormill [^`]+)`", refused.stderr)
        )
        added = run(*WITHOUT_TORCH, *add)
        assert added.returncode == 0, added.stderr
        done = run(*COMMAND, *again, "--items", "20", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["job"]["num_done"] == report["job"]["num_items"] == 20
    assert report["summary"]["model"] == {"value": model.name, "reason": "requested"}
    if "--outputs" in arguments:
        assert report["num_outputs"] == 20
        assert {len(matches) for matches in report["searches"].values()} == {5}
    else:
        assert report["num_results"] == 20
        assert sum(report["findings"]["records"].values()) > 0
