"""Reads the kernel's counters of processes that it killed for want of memory. Reads files; knows no process of ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
WHOLE_MACHINE: Final = Path("/proc/vmstat")


def count_kernel_kills(
    groups: Path = CONTROL_GROUPS, own_groups: Path = OWN_GROUPS, whole_machine: Path = WHOLE_MACHINE
) -> int | None:
    """Return how often the kernel has killed for want of memory, in this control group or on the machine; None if
    nobody counts. The count grows before the signal is sent.

    Source: Documentation/admin-guide/cgroup-v2.rst (memory.events, oom_kill: by any kind of OOM killer) and
    cgroup-v1/memory.rst (memory.oom_control).
    """
    for path in [*_list_counters(groups, own_groups), whole_machine]:
        try:
            for line in path.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
        except (OSError, ValueError):
            continue
    return None


def _list_counters(groups: Path, own_groups: Path) -> Iterator[Path]:
    """Yield the counters of cgroup version 2 and 1: by the group's path, and without it, as in a container."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield groups / group.lstrip("/") / "memory.events"
            yield groups / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / group.lstrip("/") / "memory.oom_control"
            yield groups / "memory" / "memory.oom_control"
