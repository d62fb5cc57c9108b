"""The memory that a runner's process and its device use.

MemoryGauge reads it in the runner's process, between batches.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from worker.devices.detect import detect_memory
from worker.devices.device import CUDA, Device
from worker.placement.capacity import OVERHEAD_BYTES

# Reading the memory takes 0.1 ms on a CPU and up to 1 ms on CUDA, as long as a batch of a small model. So it
# is not read for every batch.
PAUSE_SECONDS: Final = 0.25
SMALLEST_HOLES_SHARE: Final = 0.02
STATUS: Final = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes that the runner's process uses, now and at most, and on its device unless it is a CPU.

    `device_bytes` is the most that this process's tensors used on the device since the last report.
    `used_share` is the share of the device's memory that is in use by anyone; for a processor, of main
    memory. If several devices share a model, `ranks` has the reports of all ranks, and this report combines
    them.
    """

    process_bytes: int
    peak_process_bytes: int
    device_bytes: int
    used_share: float
    ranks: tuple["MemoryReport", ...] = ()


def join_reports(ranks: Sequence[MemoryReport]) -> MemoryReport:
    """Return a replica's report: the sum of its processes, and the used share of its fullest device.

    The fullest device limits the size of batches.
    """
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
        self._device = device
        self._clock = clock
        self._process = psutil.Process()
        self._read_at = float("-inf")

    def read(self) -> MemoryReport | None:
        """Return a report; None if the last one was made less than a quarter of a second ago."""
        now = self._clock()
        if now - self._read_at < PAUSE_SECONDS:
            return None
        self._read_at = now
        process_bytes = self._process.memory_info().rss
        device_bytes, used_share = (
            _read_cuda(self._device) if self._device.kind == CUDA else (0, detect_memory().used_share)
        )
        return MemoryReport(
            process_bytes=process_bytes,
            # The kernel updates the peak a little late.
            peak_process_bytes=max(process_bytes, read_peak_bytes()),
            device_bytes=device_bytes,
            used_share=used_share,
        )


def read_peak_bytes() -> int:
    """Return the peak memory of this program in bytes.

    On Linux it is not read from getrusage, whose value is inherited from the process that started this one.
    """
    if STATUS.is_file():
        peaks = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(peaks[0]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _room_bytes(device: Device) -> int:
    """Return what the tensors of one of several workers may take of the GPU that they share."""
    free_bytes = device.memory_bytes if device.free_bytes is None else device.free_bytes
    return max(0, free_bytes - OVERHEAD_BYTES[CUDA])


def cap_allocator(device: Device) -> None:
    """Keep the process of one of several workers within its part of their GPU, with all that torch caches.

    torch gives its cache back before it exceeds the cap, so no worker runs short because its neighbours cache memory.
    """
    if device.kind == CUDA and device.num_parts > 1:
        import torch  # imported late: the process of a CPU may need no torch

        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(_room_bytes(device) / total_bytes)


def _read_cuda(device: Device) -> tuple[int, float]:
    """Return the peak bytes of this process's tensors, and the share of the device's memory in use by anyone.

    Memory that the allocator caches counts as free, because it is given back before memory runs out. Holes in
    segments that are in use do not count as free. If several workers share the GPU, the share is of this worker's
    part: what the others take of theirs does not count, other programs do once they leave less than the part.
    """
    import torch  # the runner has already imported torch

    peak_bytes, allocated = int(torch.cuda.max_memory_allocated()), int(torch.cuda.memory_allocated())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if device.shares_host_memory:  # CUDA counts the kernel's cache of files as used
        host = detect_memory()
        free_bytes, total_bytes = host.available_bytes, host.total_bytes
    reserved = int(torch.cuda.memory_reserved())
    others_bytes = total_bytes - free_bytes - reserved
    if device.num_parts > 1:
        total_bytes = device.memory_bytes
        others_bytes = max(total_bytes - free_bytes - reserved, total_bytes - _room_bytes(device))
    torch.cuda.reset_peak_memory_stats()
    # The snapshot lists all segments and takes milliseconds, so it is made only if holes could matter.
    has_holes = reserved - allocated > SMALLEST_HOLES_SHARE * total_bytes
    hole_bytes = count_hole_bytes(torch.cuda.memory_snapshot()) if has_holes else 0
    return peak_bytes, (others_bytes + max(peak_bytes, allocated + hole_bytes)) / total_bytes


def count_hole_bytes(segments: Sequence[Mapping[str, Any]]) -> int:
    """Return the free bytes in segments that torch's allocator uses in part.

    They are lost to other processes: only whole segments go back to the device. Expandable segments go back
    part by part and are not counted.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["allocated_size"] and not segment.get("is_expandable", False)
    )
