"""PeakSampler: how high a number of bytes climbs while something happens. Knows nothing of what is counted."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class PeakSampler:
    """What `read` answers: before the block, and at most within it. A peak shorter than a pause may be missed."""

    def __init__(self, read: Callable[[], int], pause_seconds: float) -> None:
        self._read = read
        self._pause_seconds = pause_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak sampler", daemon=True)
        self.before_bytes = 0
        self.peak_bytes = 0

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes

    def __enter__(self) -> Self:
        self.before_bytes = self.peak_bytes = self._read()
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
        self.peak_bytes = max(self.peak_bytes, self._read())
