"""MemoryReport: what the runner's process and its device hold, asked in that process between batches; and how often
the kernel has killed for want of memory.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from worker.devices.detect import detect_memory
from worker.devices.device import CUDA, Device

# Asking costs 0.1 ms on a CPU and up to 1 ms on CUDA, a batch of a small model as much: it is not asked for every one.
PAUSE_SECONDS: Final = 0.25
SMALLEST_HOLES_SHARE: Final = 0.02
STATUS: Final = Path("/proc/self/status")
CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
WHOLE_MACHINE: Final = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of the runner's process, now and at most; and of its device, where that is not the processor.

    `device_bytes` is the most that this process's tensors held there since the last report. `used_share` is the share
    of the device's memory that anyone uses, main memory for a processor. `ranks` are the reports of all ranks where
    several devices share a model, and this one is theirs together.
    """

    process_bytes: int
    peak_process_bytes: int
    device_bytes: int
    used_share: float
    ranks: tuple["MemoryReport", ...] = ()


def join_reports(ranks: Sequence[MemoryReport]) -> MemoryReport:
    """Return the report of a replica: its processes together, and its fullest device, which bounds batches."""
    return MemoryReport(
        process_bytes=sum(rank.process_bytes for rank in ranks),
        peak_process_bytes=sum(rank.peak_process_bytes for rank in ranks),
        device_bytes=max(rank.device_bytes for rank in ranks),
        used_share=max(rank.used_share for rank in ranks),
        ranks=tuple(ranks),
    )


class MemoryGauge:
    """Reads the memory of this process and of one device, at most four times a second."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_cuda = device.kind == CUDA
        self._clock = clock
        self._process = psutil.Process()
        self._read_at = float("-inf")

    def read(self) -> MemoryReport | None:
        """Return a report; None if one was made a moment ago."""
        now = self._clock()
        if now - self._read_at < PAUSE_SECONDS:
            return None
        self._read_at = now
        process_bytes = self._process.memory_info().rss
        device_bytes, used_share = _read_cuda() if self._is_cuda else (0, detect_memory().used_share)
        return MemoryReport(
            process_bytes=process_bytes,
            # The kernel notes the peak a little late.
            peak_process_bytes=max(process_bytes, read_peak_bytes()),
            device_bytes=device_bytes,
            used_share=used_share,
        )


def read_peak_bytes() -> int:
    """Return the most memory that this program has held.

    On Linux not from getrusage, whose figure is inherited from the process that started this one.
    """
    if STATUS.is_file():
        peaks = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _read_cuda() -> tuple[int, float]:
    """Return the peak bytes of this process's tensors and the used share of the device. Memory that the allocator
    caches counts as free, because it is given back before memory runs out; holes in it do not.
    """
    import torch  # this runner has loaded it long ago

    peak_bytes, allocated = int(torch.cuda.max_memory_allocated()), int(torch.cuda.memory_allocated())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    reserved = int(torch.cuda.memory_reserved())
    others_bytes = total_bytes - free_bytes - reserved
    torch.cuda.reset_peak_memory_stats()
    # A list of all segments, which takes milliseconds: only where holes could matter.
    has_holes = reserved - allocated > SMALLEST_HOLES_SHARE * total_bytes
    hole_bytes = count_hole_bytes(torch.cuda.memory_snapshot()) if has_holes else 0
    return peak_bytes, (others_bytes + max(peak_bytes, allocated + hole_bytes)) / total_bytes


def count_hole_bytes(segments: Sequence[Mapping[str, Any]]) -> int:
    """Return the free bytes in segments of torch's allocator that are in use: only whole segments go back to the
    device, and expandable ones part by part.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["allocated_size"] and not segment.get("is_expandable", False)
    )


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
