"""GPUs that are lost and come back, as the driver would tell it, with small real processes in place of workers."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.waiting import wait_for
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.processes import supervisor
from vectormill.processes.supervisor import ChildSpec, Supervisor
from worker import launcher
from worker.devices.described import describe_inventory
from worker.devices.device import NVLINK, Inventory
from worker.devices.presence import LONGEST_PAUSE, GpuPresence
from worker.launcher import PlanFollower, plan_left
from worker.placement.placement import Assignment
from worker.report import read_losses
from worker.settings import WorkerSettings

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
NOW = datetime(2026, 11, 30, 8, 5, tzinfo=UTC)
GIB = 1 << 30


def describe(*numbers: int, used_gib: int = 1) -> Inventory:
    """The GPUs with these numbers on the bus, numbered anew as the driver does, and other programs on each."""
    found = describe_inventory(f"{max(1, len(numbers))}x24GiB,nvlink")
    gpus = [
        replace(gpu, uuid=f"GPU-{number}", free_bytes=(24 - used_gib) * GIB)
        for gpu, number in zip(found.accelerators, numbers, strict=False)
    ]
    return replace(found, accelerators=tuple(gpus))


@dataclass
class Machine:
    """A follower with its processes, and the assignments of all that it ever started."""

    presence: GpuPresence
    follower: PlanFollower
    started: list[Assignment]
    losses: Path

    def see(self, *numbers: int, used_gib: int = 9) -> None:
        """Look twice, and find these GPUs both times."""
        before = self.presence.inventory
        self.follower.look(describe(*numbers, used_gib=used_gib), NOW)
        assert self.presence.is_in_doubt
        self.follower.look(describe(*numbers, used_gib=used_gib), NOW)
        assert self.presence.inventory != before

    def pids(self) -> dict[str, int]:
        """The processes by the names of their devices."""

        def all_run() -> bool:
            return all(self.follower.supervisor.pids.values())

        wait_for(all_run)
        return {
            name.removeprefix(f"{CARD.name} on "): pid or 0
            for name, pid in self.follower.supervisor.pids.items()
        }

    def told(self) -> Sequence[str]:
        return read_losses(self.losses)


@contextmanager
def run_machine(
    tmp_path: Path,
    inventory: Inventory,
    *,
    script: str = "exec sleep 60",
    **settings: object,
) -> Iterator[Machine]:
    presence = GpuPresence(inventory)
    started: list[Assignment] = []

    def make_spec(name: str, model: str, assignment: Assignment) -> ChildSpec:
        started.append(assignment)
        return ChildSpec(name, ("sh", "-c", script, assignment.devices[0].uuid), {"PATH": "/usr/bin:/bin"})

    worker_settings = WorkerSettings(**settings)  # type: ignore[arg-type]
    follower = PlanFollower(
        presence,
        lambda: plan_left([CARD], presence, worker_settings),
        make_spec,
        tmp_path / "losses",
        threading.Event(),
    )
    try:
        follower.supervisor.start(20)
        yield Machine(presence, follower, started, tmp_path / "losses")
    finally:
        follower.supervisor.stop(5)


@pytest.mark.parametrize("devices", ["auto", "cuda", "cuda:0,cuda:1,cuda:2"])
def test_a_lost_device_is_planned_around_and_planned_in_again_when_it_is_back(
    tmp_path: Path, devices: str
) -> None:
    """The driver numbers what is left anew, and neighbours have taken memory; neither moves the other replicas."""
    with run_machine(tmp_path, describe(0, 1, 2), devices=devices) as machine:
        before = machine.pids()
        assert (list(before), machine.told()) == (["cuda:0", "cuda:1", "cuda:2"], [])
        machine.see(0, 2)
        assert machine.pids() == {name: before[name] for name in ("cuda:0", "cuda:2")}
        (line,) = machine.told()
        assert (
            "cuda:1 (GPU-1) is lost since 2026-11-30 08:05 UTC; the plan leaves it out until it is back."
            in line
        )
        machine.see(0, 1, 2)
        after = machine.pids()
        assert {name for name in before if after[name] == before[name]} == {"cuda:0", "cuda:2"}
        assert machine.told() == []
        assert machine.started[-1] == machine.started[1], "as it was planned at the start"


def test_two_devices_of_a_shared_model_are_lost_at_once_and_the_rest_share_it(tmp_path: Path) -> None:
    with run_machine(tmp_path, describe(0, 1, 2, 3), strategy="pipeline") as machine:
        before = machine.pids()
        assert list(before) == ["cuda:0,cuda:1", "cuda:2,cuda:3"]
        machine.see(1, 2)
        assert list(machine.pids()) == ["cuda:1,cuda:2"]
        assert [device.uuid for device in machine.started[-1].devices] == ["GPU-1", "GPU-2"]
        assert [line.split(", ")[1].split(" is")[0] for line in machine.told()] == [
            "cuda:0 (GPU-0)",
            "cuda:3 (GPU-3)",
        ]
        machine.see(0, 1, 2, 3)
        assert list(machine.pids()) == list(before)


@pytest.mark.parametrize("devices", ["auto", "cuda", "cuda:0,cuda:1"])
def test_when_all_are_lost_what_runs_is_kept_until_they_are_back(tmp_path: Path, devices: str) -> None:
    with run_machine(tmp_path, describe(0, 1), devices=devices) as machine:
        before = machine.pids()
        machine.see()
        assert machine.pids() == before
        assert len(machine.told()) == 2
        assert all(
            "nothing fits without it, so what runs is kept until it is back" in line
            for line in machine.told()
        )
        machine.see(0, 1)
        assert (machine.pids(), machine.told()) == (before, [])


def test_a_device_that_was_lost_at_the_start_is_planned_in_when_it_is_back(tmp_path: Path) -> None:
    with run_machine(tmp_path, describe(0, 2)) as machine:
        before = machine.pids()
        machine.see(0, 1, 2)
        after = machine.pids()
        assert {name: after[name] for name in before} == before
        assert list(after) == ["cuda:0", "cuda:1", "cuda:2"]
        assert machine.started[-1].devices[0].uuid == "GPU-1"
        links = machine.presence.inventory.links
        assert {links.between("cuda:2", name) for name in before} == {NVLINK}
        assert machine.told() == []


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (launcher, "draw_placement"),
        (Supervisor, "change"),
        (supervisor, "_stop"),  # what was to leave may have been stopped
        (supervisor._Keeper, "start"),  # what was to come may run
        (Path, "write_text"),
    ],
)
@pytest.mark.parametrize("then", [(1, 2), (0, 1, 2, 3)])
def test_a_plan_that_could_not_be_followed_is_tried_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str, then: tuple[int, ...]
) -> None:
    """Also where the GPUs are back until then."""
    with run_machine(tmp_path, describe(0, 1, 2, 3), strategy="pipeline") as machine:
        machine.pids()
        work = getattr(owner, step)
        calls = 0

        def fail_twice(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            done = work(*arguments, **options)
            if calls <= 2:
                raise OSError("No space left on device")
            return done

        monkeypatch.setattr(owner, step, fail_twice)
        with pytest.raises(OSError, match="No space left"):
            machine.see(1, 2)
        with pytest.raises(OSError, match="No space left"):
            machine.follower.look(describe(*then), NOW)
        machine.follower.look(describe(*then), NOW)
        num_calls = calls
        machine.follower.look(describe(*then), NOW)
        assert calls == num_calls, "once is enough"
        expected = ["cuda:1,cuda:2"] if len(then) == 2 else ["cuda:0,cuda:1", "cuda:2,cuda:3"]
        assert list(machine.pids()) == expected
        assert len(machine.told()) == 4 - len(then)


def test_a_process_that_ends_has_the_devices_looked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(launcher, "CONFIRM_SECONDS", 0.01)
    script = f'test -e "{tmp_path}/$0" && exit 1; exec sleep 60'
    with run_machine(tmp_path, describe(0, 1), script=script) as machine:
        there = [0, 1]
        looking = [lambda: describe(*there)]
        threading.Thread(target=machine.follower.watch, args=looking, daemon=True).start()
        before = machine.pids()
        there.remove(1)
        (tmp_path / "GPU-1").touch()
        os.kill(before["cuda:1"], signal.SIGKILL)
        wait_for(lambda: list(machine.follower.supervisor.pids) == [f"{CARD.name} on cuda:0"])
        assert machine.pids()["cuda:0"] == before["cuda:0"]


ALL = frozenset(range(3))
# The most changes by one GPU within an hour: it is lost seven times, and stays 0, 1, 2, 4, 8 and 16 minutes between.
MOST_CHANGES = 14

describe_once = cache(describe)


@example([({0, 2}, 2), (ALL, 2)] * 50)  # lost and back every other minute
@example([({0, 2}, 2), (ALL, 8)] * 50)
@given(st.lists(st.tuples(st.sets(st.integers(0, 2)), st.sampled_from([1, 2, 3, 10, 30, 61])), max_size=20))
def test_a_gpu_that_is_lost_again_and_again_changes_few_plans_and_one_that_stays_is_planned_in(
    history: list[tuple[set[int], int]],
) -> None:
    """Each GPU is told by its own changes: a change counts once two looks in a row show it, and a first one at once."""
    presence, now = GpuPresence(describe_once(*ALL)), NOW
    planned, before = ALL, ALL
    changes: dict[int, list[datetime]] = {each: [] for each in ALL}
    for there, minutes in [*history, (ALL, 5 + LONGEST_PAUSE // timedelta(minutes=1))]:
        end = now + timedelta(minutes=minutes)
        while now < end:
            now += timedelta(seconds=5 if presence.is_in_doubt else 60)
            is_changed = presence.compare(describe_once(*sorted(there)), now)
            left = frozenset(
                int(device.uuid.removeprefix("GPU-")) for device in presence.inventory.accelerators
            )
            assert is_changed == (left != planned)
            for each in ALL:
                if (each in left) != (each in planned):
                    assert (each in left) == (each in there) == (each in before)
                    changes[each].append(now)
                elif (each in left) != (each in there) == (each in before):
                    assert each not in left
                    assert changes[each][-1] - changes[each][-2] < LONGEST_PAUSE, "since it was back"
            planned, before = left, frozenset(there)
    assert planned == ALL
    for times in changes.values():
        for first, last in zip(times, times[MOST_CHANGES:], strict=False):
            assert last - first > LONGEST_PAUSE


def test_how_long_a_gpu_must_stay_that_was_lost_repeatedly_is_told() -> None:
    presence, now, told = GpuPresence(describe(0, 1)), NOW, list[str]()
    for there in [(0,), (0, 1)] * 3:
        for _ in range(10):
            now += timedelta(minutes=1)
            if presence.compare(describe(*there), now):
                told += presence.describe_lost().values()
    since = ["08:07", "08:27", "08:47"]
    assert told == [
        f"cuda:1 (GPU-1) is lost since 2026-11-30 {time} UTC{more}"
        for time, more in zip(
            since,
            [
                "",
                ", and must stay for 1 min",
                ", and must stay for 2 min",
            ],
            strict=True,
        )
    ]
