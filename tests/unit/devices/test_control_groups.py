"""The limits of the process's own control group and of all groups around it: fabricated trees, and a real one."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock
from uuid import uuid4

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.devices.control_groups import count_oom_kills, list_memory_limits, read_cpu_quota
from worker.devices.detect import detect_memory

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712  # what version 1 says of a group without a limit


@dataclass(frozen=True)
class Level:
    """One group: its limit in MiB (None: unlimited), what is used, how much of that is cached, its CPU quota."""

    limit: int | None
    used: int
    cached: int
    quota: int | None  # in hundredths of a core


LEVELS = st.builds(
    Level,
    limit=st.none() | st.integers(100, 2000),
    used=st.integers(0, 3000),
    cached=st.integers(0, 500),
    quota=st.none() | st.integers(1, 6400),
)


def write(folder: Path, files: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def write_level(version: str, root: Path, path: str, level: Level) -> None:
    if version == "2":
        limit = "max" if level.limit is None else level.limit * MIB
        quota = "max" if level.quota is None else level.quota * 1000
        stat = f"anon 7\ninactive_file {level.cached * MIB}\nactive_file 5"
        files = {"memory.max": limit, "memory.current": level.used * MIB, "memory.stat": stat}
        return write(root / path, files | {"cpu.max": f"{quota} 100000"})
    limit = UNLIMITED_V1 if level.limit is None else level.limit * MIB
    stat = f"inactive_file 1\ntotal_inactive_file {level.cached * MIB}"
    files = {"limit_in_bytes": limit, "usage_in_bytes": level.used * MIB, "stat": stat}
    write(root / "memory" / path, {f"memory.{name}": content for name, content in files.items()})
    quota = -1 if level.quota is None else level.quota * 1000
    return write(root / "cpu,cpuacct" / path, {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100000})


OWN_LINES = {
    "2": "0::/{path}\n",
    "1": "5:cpu,cpuacct:/{path}\n4:memory:/{path}\n1:name=systemd:/elsewhere\n",
    "hybrid": "5:cpu,cpuacct:/{path}\n4:memory:/{path}\n0::/init.scope\n",
}


@given(
    st.sampled_from(["2", "1", "hybrid"]),
    st.lists(LEVELS, min_size=1, max_size=4),
    st.sampled_from(["", "kubepods/pod1", "kubepods/pod1/gone"]),
    st.integers(64, 4000),
)
def test_the_smallest_limit_and_the_least_left_of_all_groups_around_the_process_hold(
    version: str, levels: list[Level], outside: str, available: int
) -> None:
    """The root of what is mounted comes first; a container is told a path that begins `outside` of that."""
    names = [f"level{number}" for number in range(len(levels))][1:]
    with TemporaryDirectory() as folder:
        root, own = Path(folder) / "cgroup", Path(folder) / "own"
        for number, level in enumerate(levels):
            write_level(version, root, "/".join(names[:number]), level)
        if version == "hybrid":
            (root / "unified").mkdir()
        neighbour = Level(1, 1, 0, 1)
        write_level(version, root, "neighbour", neighbour)
        own.write_text(OWN_LINES[version].format(path="/".join([outside, *names]).strip("/")))
        machine = Level(4096, 4096 - available, 0, None)
        found = list_memory_limits(root, own)
        expected = [level for level in levels if level.limit is not None]
        assert sorted(found) == sorted(
            ((level.limit or 0) * MIB, max(0, level.used - level.cached) * MIB) for level in expected
        )
        memory_of_machine = SimpleNamespace(total=4096 * MIB, available=available * MIB)
        with mock.patch.object(psutil, "virtual_memory", return_value=memory_of_machine):
            memory = detect_memory(root, own)
        bounds = [machine, *expected]
        assert memory.total_bytes == MIB * min(bound.limit or 0 for bound in bounds)
        left = min((bound.limit or 0) - max(0, bound.used - bound.cached) for bound in bounds)
        assert memory.available_bytes == MIB * max(0, left)
        quotas = [level.quota / 100 for level in levels if level.quota is not None]
        assert read_cpu_quota(root, own) == (min(quotas) if quotas else None)


def test_a_group_that_is_slowed_down_beyond_a_limit_or_may_not_swap_is_bound_by_that(tmp_path: Path) -> None:
    unified, legacy, own = tmp_path / "2", tmp_path / "1", tmp_path / "own"
    write(unified, {"memory.max": "max", "memory.high": 300, "memory.current": 100, "memory.stat": ""})
    swap = {"memory.memsw.limit_in_bytes": 500, "memory.memsw.usage_in_bytes": 450}
    write(legacy / "memory", {"memory.limit_in_bytes": 400, "memory.usage_in_bytes": 100, **swap})
    own.write_text("0::/\n")
    assert list_memory_limits(unified, own) == [(300, 100)]
    own.write_text("4:memory:/\n")
    assert list_memory_limits(legacy, own) == [(400, 100), (500, 450)]


@pytest.mark.parametrize("lines", [None, "", "0::/../neighbour\n", "0::/gone\n"])
def test_without_a_group_or_a_limit_there_is_none(tmp_path: Path, lines: str | None) -> None:
    own = tmp_path / "own"
    if lines is not None:
        own.write_text(lines)
    write(tmp_path / "neighbour", {"memory.max": 1, "memory.current": 1, "cpu.max": "1 1"})
    assert (list_memory_limits(tmp_path, own), read_cpu_quota(tmp_path, own)) == ([], None)


@pytest.mark.parametrize(
    ("own_group", "counter", "content", "expected"),
    [
        ("0::/user.slice/app", "user.slice/app/memory.events", "low 0\nmax 7\noom 3\noom_kill 2\n", 2),
        ("0::/", "memory.events", "oom_kill 4\noom_group_kill 0\n", 4),  # a container sees its group as the root
        ("0::/gone", "memory.events", "oom_kill 5\n", 5),
        ("4:memory:/app\n0::/", "memory/app/memory.oom_control", "under_oom 0\noom_kill 1\n", 1),
        ("4:memory:/app\n0::/", "memory/memory.oom_control", "oom_kill_disable 0\noom_kill 6\n", 6),
        (None, "elsewhere", "oom_kill 7\n", 99),  # no control groups: those of the machine
    ],
)  # fmt: skip
def test_the_kills_of_the_own_control_group_are_counted(
    tmp_path: Path, own_group: str | None, counter: str, content: str, expected: int
) -> None:
    root, own, machine = tmp_path / "groups", tmp_path / "own", tmp_path / "vmstat"
    if own_group is not None:
        own.write_text(own_group + "\n")
    (root / counter).parent.mkdir(parents=True)
    (root / counter).write_text(content)
    machine.write_text("nr_free_pages 1\noom_kill 99\n")
    assert count_oom_kills(root, own, machine) == expected


ROOTS = {"1": Path("/sys/fs/cgroup/memory"), "2": Path("/sys/fs/cgroup")}
LIMITS = {"1": "memory.limit_in_bytes", "2": "memory.max"}
INSIDE = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from worker.devices.detect import detect_memory
before = detect_memory()
held = b"x" * (64 << 20)
after = detect_memory()
print(before.total_bytes, before.available_bytes - after.available_bytes)
"""


@pytest.fixture
def real_groups() -> Iterator[tuple[Path, str]]:
    """An outer and an inner group of this machine; skipped where this user may make none."""
    version = "1" if ROOTS["1"].is_dir() else "2"
    outer = ROOTS[version] / f"vectormill-test-{uuid4().hex}"
    made: list[Path] = []
    try:
        if version == "2":
            (ROOTS["2"] / "cgroup.subtree_control").write_text("+memory")
        for folder in (outer, outer / "inner"):
            folder.mkdir()
            made.append(folder)
            if version == "2" and folder == outer:
                (outer / "cgroup.subtree_control").write_text("+memory")
            if not (folder / LIMITS[version]).is_file():
                raise FileNotFoundError(folder / LIMITS[version])
    except OSError as error:
        for folder in reversed(made):
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield outer, version
    for folder in reversed(made):
        folder.rmdir()


def test_a_process_in_a_real_group_is_bound_by_the_group_around_its_own(
    real_groups: tuple[Path, str],
) -> None:
    outer, version = real_groups
    (outer / LIMITS[version]).write_text(str(512 * MIB))
    (outer / "inner" / LIMITS[version]).write_text(str(768 * MIB))
    argv = [sys.executable, "-c", INSIDE, str(outer / "inner")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)
    total, grown = map(int, done.stdout.split())
    assert total == 512 * MIB
    assert 48 * MIB < grown < 96 * MIB
