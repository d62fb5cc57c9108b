"""Read what the kernel allows this process's control group, and every group around it, of memory and of the processor.

Versions 1 and 2 and their mixture, as Docker, Kubernetes, systemd and Slurm set them up. Source: the kernel's
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, scheduler/sched-bwc.rst.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
WHOLE_MACHINE: Final = Path("/proc/vmstat")

# The files of a limit and of what counts towards it. Beyond memory.high processes are not killed, but hardly run.
MEMORY_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)
# Version 1 says "unlimited" with the largest number of whole pages.
UNLIMITED_BYTES: Final = 1 << 62


def list_memory_limits(root: Path = ROOT, own: Path = OWN) -> list[tuple[int, int]]:
    """Return the limit and the used bytes of each group that has a limit.

    Pages of files that were not used lately do not count as used, because the kernel drops them first.
    """
    found = []
    for folder in _list_groups("memory", root, own):
        for limit_file, used_file in MEMORY_FILES:
            limit, used = _read(folder / limit_file), _read(folder / used_file)
            if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED_BYTES:
                stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                # In version 1 only the total includes the groups within, as the used bytes do.
                cached = stat.get("total_inactive_file") or stat.get("inactive_file", "0")
                found.append((int(limit), max(0, int(used) - int(cached))))
    return found


def read_cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Return the smallest quota of the groups in cores; None without a quota."""
    quotas = []
    for folder in _list_groups("cpu", root, own):
        words = _read(folder / "cpu.max").split()
        quota, period = words or (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def count_oom_kills(root: Path = ROOT, own: Path = OWN, whole_machine: Path = WHOLE_MACHINE) -> int | None:
    """Return how often the kernel has killed for lack of memory, in this control group or on the machine.

    None if no counter can be read. The kernel increments its counter before it sends the signal, in the group of the
    process that it kills, whichever group's limit was reached.
    """
    names = ("memory.events", "memory.oom_control")
    for path in [
        *(group / name for group in _list_groups("memory", root, own) for name in names),
        whole_machine,
    ]:
        for line in _read(path).splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdecimal():
                return int(number)
    return None


def _list_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups with this controller, each followed by the groups around it.

    A container may be told a path that begins outside of what is mounted for it; the longest end that exists is its
    group.
    """
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount = root / "unified" if (root / "unified").is_dir() else root
        elif controller in controllers.split(","):
            mount = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        names = [] if ".." in path else path.strip("/").split("/")
        ends = (mount.joinpath(*names[start:]) for start in range(len(names) + 1))
        group = next((end for end in ends if end.is_dir()), mount)
        yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _read(path: Path) -> str:
    """Return a file's text without blanks around it; nothing if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
