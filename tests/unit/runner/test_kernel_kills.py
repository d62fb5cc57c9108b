"""Whether the kernel killed for want of memory, as its counters say it in either version of control groups."""

from pathlib import Path

import pytest

from worker.runner.memory import count_kernel_kills


@pytest.mark.parametrize(
    ("own_group", "counter", "content", "expected"),
    [
        ("0::/user.slice/app", "user.slice/app/memory.events", "low 0\nmax 7\noom 3\noom_kill 2\n", 2),
        (
            "0::/",
            "memory.events",
            "oom_kill 4\noom_group_kill 0\n",
            4,
        ),  # a container sees its own group as the root
        ("0::/gone", "memory.events", "oom_kill 5\n", 5),
        ("4:memory:/app\n0::/", "memory/app/memory.oom_control", "under_oom 0\noom_kill 1\n", 1),
        ("4:memory:/app\n0::/", "memory/memory.oom_control", "oom_kill_disable 0\noom_kill 6\n", 6),
    ],
)
def test_the_kills_of_the_own_control_group_are_counted(
    tmp_path: Path, own_group: str, counter: str, content: str, expected: int
) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    own.write_text(own_group + "\n")
    (groups / counter).parent.mkdir(parents=True)
    (groups / counter).write_text(content)
    machine = tmp_path / "vmstat"
    machine.write_text("nr_free_pages 1\noom_kill 99\n")
    assert count_kernel_kills(groups, own, machine) == expected


def test_without_a_control_group_those_of_the_machine_are(tmp_path: Path) -> None:
    machine = tmp_path / "vmstat"
    machine.write_text("nr_free_pages 1\noom_kill 3\n")
    assert count_kernel_kills(tmp_path, tmp_path / "missing", machine) == 3


def test_where_nobody_counts_nothing_is_known(tmp_path: Path) -> None:
    assert count_kernel_kills(tmp_path, tmp_path / "missing", tmp_path / "missing") is None
