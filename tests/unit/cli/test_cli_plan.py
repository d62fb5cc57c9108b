import json
from functools import partial
from pathlib import Path

import pytest

from tests.commands import run as run_command
from vectormill.models.registry import find_packaged_model

run = partial(run_command, "plan")


def test_a_plan_in_json_has_bytes_as_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--devices", "1x8GiB", "--precision", "fp32", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    shard = plan["replicas"][0]["stages"][0]["shards"][0]
    assert shard["device"] == "cuda:0"
    assert 80 << 20 < shard["weight_bytes"] < 100 << 20  # 22.7 million values of 4 bytes, without the pooler
    assert (
        shard["headroom_bytes"] == shard["capacity_bytes"] - shard["weight_bytes"] - shard["activation_bytes"]
    )


def test_models_that_share_a_machine_are_planned_together(capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--model", "all-MiniLM-L6-v2", "--model", "docs/plans/mistral-7b"]
    assert run("--devices", "2x80GiB", *both) == 0
    drawn = capsys.readouterr().out
    assert drawn.count("share these devices, their memory and their time") == 2
    assert run("--devices", "2x80GiB", *both, "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == ["all-MiniLM-L6-v2", "mistral-7b"]


def test_a_plan_that_cannot_be_made_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in [
        (["--devices", "4x24"], "Unknown device '4x24'"),  # no GiB: taken as a name
        (["--devices", "4x24GiB,usb"], "in GiB, such as 4x24GiB,nvlink"),
        (["--devices", "8x80GB"], "expected GPUs with their memory in GiB"),
        (["--devices", "1x0.85GiB"], "(1) one device with at least 1 GiB of memory"),
        (["--devices", "2x8GiB", "--strategy", "best"], "--strategy: must be one of auto, replicate"),
        (["--model", "none"], "all-MiniLM-L6-v2"),
    ]:
        assert run(*arguments) != 0
        assert sentence in capsys.readouterr().err


def test_a_model_whose_weights_are_not_there_is_planned_by_its_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packaged = find_packaged_model()
    assert packaged is not None
    (tmp_path / "config.json").write_text((packaged / "config.json").read_text())
    assert run("--model", str(tmp_path), "--devices", "1x8GiB", "--json") == 0
    outlined = json.loads(capsys.readouterr().out)
    assert run("--model", str(packaged), "--devices", "1x8GiB", "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    weights = [plan["replicas"][0]["stages"][0]["shards"][0]["weight_bytes"] for plan in (outlined, whole)]
    assert weights[0] == weights[1]
    assert run("--model", str(tmp_path / "nowhere"), "--devices", "1x8GiB") == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_plan_of_a_model_that_no_worker_would_load_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packaged = find_packaged_model()
    assert packaged is not None
    config = json.loads((packaged / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("--model", str(tmp_path), "--devices", "1x8GiB") == 0
    said = capsys.readouterr()
    assert "No worker will load it" in said.err
    assert "a masked language model" in said.err
    assert said.out.startswith("replicate")
