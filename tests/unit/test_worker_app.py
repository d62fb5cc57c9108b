"""What a worker decides before it loads anything."""

import sys

import pytest

from vectormill.domain.errors import ConfigurationError
from vectormill.registry import DEFAULT_MODEL, Registry
from worker import app
from worker.app import find_replica
from worker.placement.picture import part_json
from worker.settings import load_worker_settings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)


def test_a_worker_on_one_device_tells_its_part_of_the_plan_and_why() -> None:
    placement, replica, devices = find_replica(CARD, load_worker_settings(devices="cpu"), "cpu:0")
    assert [device.name for device in devices] == ["cpu:0"]
    part = part_json(placement, replica)
    (stage,) = part["stages"]
    assert (part["strategy"], stage["num_layers"], len(stage["shards"])) == ("replicate", 6, 1)
    assert part["plan"]["num_replicas"] == 1
    assert part["plan"]["reasons"]


def test_a_worker_whose_devices_are_no_replica_of_the_plan_says_how_to_start_it() -> None:
    with pytest.raises(ConfigurationError, match="start `vectormill worker` instead"):
        find_replica(CARD, load_worker_settings(devices="cpu"), "cuda:7")


def test_large_blocks_of_memory_are_kept_apart_before_a_worker_takes_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []
    monkeypatch.setattr(sys, "argv", ["app", "--model", CARD.name, "--device", "cpu:0", "--devices", "cpu:0"])
    monkeypatch.setattr(app, "keep_large_blocks_apart", lambda: steps.append("apart"))
    monkeypatch.setattr(app, "run_replica", lambda *_: steps.append("run"))
    app.main()
    assert steps == ["apart", "run"]
