"""ReplicaMemory: how full the devices of one replica are, by the newest report. Knows no batch."""

from typing import Any, Final

from worker.devices.device import Device
from worker.runner.memory import MemoryReport
from worker.runner.starter import Sharing

NOTHING: Final = MemoryReport(0, 0, 0, 0.0)


class ReplicaMemory:
    """`report` is None until the model is loaded. Replaced by the executor's thread, described by any."""

    def __init__(self, device: Device, sharing: Sharing | None = None) -> None:
        self._device = device
        self._sharing = sharing
        self.report: MemoryReport | None = None

    def used_shares(self) -> list[tuple[Device, float]]:
        """Return the used share of each device of the replica; of the first alone if no rank has reported."""
        report = self.report or NOTHING
        if self._sharing is None or not report.ranks:
            return [(self._device, report.used_share)]
        shares = [rank.used_share for rank in report.ranks]
        return list(zip(self._sharing.devices, shares, strict=True))

    def count_free_bytes(self, most_share: float) -> int:
        """Return the free bytes below this share, on the device that has least. Negative if more is in use."""
        return min(int((most_share - used) * device.memory_bytes) for device, used in self.used_shares())

    @property
    def fullest(self) -> str:
        """Return a phrase such as "95 % of the memory of cuda:0"."""
        device, used_share = max(self.used_shares(), key=lambda used: used[1])
        return f"{100 * used_share:.0f} % of the memory of {device.name}"

    def describe(self) -> dict[str, Any]:
        """Return the memory for the worker's report, for each rank too where devices share the model."""
        report = self.report or NOTHING
        if self._sharing is None:
            return _describe(report)
        ranks = zip(self._sharing.devices, report.ranks, strict=False)  # none before the model is loaded
        of_ranks = [{"device": device.name, **_describe(rank)} for device, rank in ranks]
        return {**_describe(report), "memory_of_ranks": of_ranks}


def _describe(memory: MemoryReport) -> dict[str, Any]:
    return {
        "memory_bytes": memory.process_bytes,
        "peak_memory_bytes": memory.peak_process_bytes,
        "device_memory_bytes": memory.device_bytes,
        "memory_used_share": memory.used_share,
    }
