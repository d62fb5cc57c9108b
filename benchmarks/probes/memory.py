"""MemorySampler: how much memory processes take together while something happens. Knows nothing of what they do."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import psutil

from benchmarks.probes.peak import PeakSampler

PAUSE_SECONDS: Final = 0.005


class MemorySampler(PeakSampler):
    """Resident bytes of some processes, summed.

    Pages that two processes share count twice. A process that has ended counts as nothing.
    """

    def __init__(self, processes: Sequence[psutil.Process], pause_seconds: float = PAUSE_SECONDS) -> None:
        super().__init__(partial(resident_bytes, processes), pause_seconds)


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """What the processes have in memory now."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def private_bytes(processes: Sequence[psutil.Process]) -> int:
    """What each of the processes has for itself: without files that are mapped and memory that is shared.

    Linux alone tells them apart; elsewhere all that is resident counts.
    """
    total = 0
    for process in processes:
        try:
            memory = process.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += memory.rss - getattr(memory, "shared", 0)
    return total
