"""What a worker is told, and does, before it loads anything."""

import os
import sys

import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker import app
from worker.devices.described import describe_inventory
from worker.devices.device import CUDA, Device
from worker.launcher import assign_replicas
from worker.placement.placement import Assignment, read_assignment, write_assignment
from worker.plan import plan_machine
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)


def assign(devices: str, **settings: object) -> list[Assignment]:
    (planned,) = plan_machine([CARD], describe_inventory(devices), WorkerSettings(**settings))  # type: ignore[arg-type]
    return assign_replicas(planned)


@pytest.mark.parametrize(
    ("devices", "strategy"),
    [("2x16cores,64GiB", "auto"), ("1x24GiB", "auto"), ("4x24GiB", "pipeline"), ("2x24GiB", "fully_sharded")],
)
def test_a_worker_runs_the_replica_that_was_planned_for_it_and_plans_nothing_itself(
    devices: str, strategy: str
) -> None:
    for assignment in assign(devices, strategy=strategy):
        assert read_assignment(write_assignment(assignment)) == assignment
        assert assignment.replica.devices == tuple(device.name for device in assignment.devices)
        assert assignment.part["plan"]["reasons"]


def test_a_gpu_is_named_by_its_uuid_between_the_launcher_and_its_worker() -> None:
    gpu = Device("cuda:0", CUDA, 0, (), 1, 24 << 30, frozenset({"sm_90"}), uuid="GPU-1", free_bytes=20 << 30)
    (assignment, *_) = assign("1x24GiB")
    again = read_assignment(write_assignment(Assignment(assignment.part, (gpu,))))
    assert again.devices == (gpu,)


def test_the_worker_of_each_numa_node_is_pinned_to_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = assign("2x4cores,64GiB")
    pinned: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(set(cores)), raising=False)
    app.pin_process(first.cores)
    app.pin_process(second.cores)
    app.pin_process(assign("1x24GiB")[0].cores)  # nor is the process that feeds a GPU
    assert pinned == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_large_blocks_of_memory_are_kept_apart_before_a_worker_takes_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[str] = []
    (assignment,) = assign("1x24GiB")
    argv = ["app", "--model", CARD.name, "--assignment", write_assignment(assignment)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(app, "keep_large_blocks_apart", lambda: steps.append("apart"))
    monkeypatch.setattr(app, "run_replica", lambda *_: steps.append("run"))
    app.main()
    assert steps == ["apart", "run"]
