"""MemorySampler: how much memory processes take together while something happens. Knows nothing of what they do."""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import psutil

PAUSE_SECONDS: Final = 0.005


class MemorySampler:
    """Resident bytes of some processes, summed: before the block, and at most within it.

    Pages that two processes share count twice. A peak shorter than the pause between two samples may be missed. A
    process that has ended counts as nothing.
    """

    def __init__(self, processes: Sequence[psutil.Process], pause_seconds: float = PAUSE_SECONDS) -> None:
        self._processes = processes
        self._pause_seconds = pause_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory sampler", daemon=True)
        self.before_bytes = 0
        self.peak_bytes = 0

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes

    def __enter__(self) -> Self:
        self.before_bytes = self.peak_bytes = resident_bytes(self._processes)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._is_over.wait(self._pause_seconds):
            self._take()

    def _take(self) -> None:
        self.peak_bytes = max(self.peak_bytes, resident_bytes(self._processes))


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """What the processes have in memory now."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
