"""What a worker is told, and does, before it loads anything."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.processes.supervisor import ChildSpec
from worker import app, launcher
from worker.devices.described import describe_inventory
from worker.devices.detect import describe_shared_memory
from worker.devices.device import CUDA, Device, parse_devices
from worker.identity import EndedWorker
from worker.launcher import MAX_ENDED, assign_replicas, make_process_spec
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


REPLICA = ChildSpec("m on cpu:0", ("worker",), {})


def read_ended(spec: ChildSpec) -> list[EndedWorker]:
    return [
        EndedWorker.parse(each.removeprefix("--ended=")) for each in spec.argv if each.startswith("--ended=")
    ]


def next_of(spec: ChildSpec, status: int) -> ChildSpec:
    assert spec.succeed is not None
    return spec.succeed(status)


def test_every_process_has_an_incarnation_of_its_own_and_knows_how_the_former_ended() -> None:
    first = make_process_spec(REPLICA)
    second = next_of(first, -signal.SIGSEGV)
    (former,) = read_ended(second)
    assert f"--incarnation={former.incarnation}" in first.argv
    assert f"--incarnation={former.incarnation}" not in second.argv
    assert (former.is_evidence, former.end) == (True, "SIGSEGV")


def test_ends_that_others_caused_are_no_evidence() -> None:
    for status in (-signal.SIGKILL, -signal.SIGTERM, 0, 1):
        assert not EndedWorker(
            read_ended(next_of(make_process_spec(REPLICA), status))[0].incarnation, status
        ).is_evidence


def test_a_process_that_the_kernel_killed_for_want_of_memory_is_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a text that takes all memory outside of the model's process would be tried for ever."""
    kills = iter([4, 5, 5, 5, 5])
    monkeypatch.setattr(launcher, "count_oom_kills", lambda: next(kills))
    second = next_of(make_process_spec(REPLICA), -signal.SIGKILL)
    third = next_of(second, -signal.SIGKILL)
    by_kernel, by_somebody = read_ended(third)
    assert (by_kernel.is_evidence, by_somebody.is_evidence) == (True, False)
    assert by_kernel.end == "SIGKILL, by the kernel for lack of memory"


def test_what_could_not_be_told_is_told_later_and_grows_no_command_line_without_end() -> None:
    def ends(spec: ChildSpec) -> Iterator[int]:
        for former in read_ended(spec):
            yield former.status

    spec = make_process_spec(REPLICA)
    for status in range(20):
        spec = next_of(spec, status)
    assert list(ends(spec)) == list(range(20 - MAX_ENDED, 20))


@pytest.mark.parametrize(
    ("devices", "free_mib", "is_told"),
    [
        ("2x24GiB", 64, True),  # what Docker gives a container
        ("2x24GiB", 1023, True),
        ("2x24GiB", 1024, False),
        ("1x24GiB", 64, False),  # it exchanges nothing
        ("2x8cores,64GiB", 64, False),  # processors exchange by gloo
    ],
)
def test_gpus_that_share_a_model_say_what_they_need_where_little_memory_can_be_shared(
    devices: str, free_mib: int, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = describe_inventory(devices)
    named = parse_devices("auto" if there.accelerators else "cpu:0,cpu:1", there)
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=free_mib << 20))
    told = describe_shared_memory(named, tmp_path)
    assert ("--shm-size 2g" in told and f"has {free_mib} MiB" in told) if is_told else told == ""
    assert describe_shared_memory(named, tmp_path / "none") == ""
