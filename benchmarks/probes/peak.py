"""PeakSampler: how high a number of bytes climbs while something happens. Knows nothing of what is counted."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from benchmarks.probes.alongside import Alongside


class PeakSampler(Alongside):
    """What `read` answers: before the block, and at most within it. A peak shorter than a pause may be missed."""

    def __init__(self, read: Callable[[], int], pause_seconds: float) -> None:
        super().__init__("peak sampler")
        self._read = read
        self._pause_seconds = pause_seconds
        self.before_bytes = 0
        self.peak_bytes = 0

    @property
    def growth_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes

    def __enter__(self) -> Self:
        self.before_bytes = self.peak_bytes = self._read()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._take()

    def run(self) -> None:
        while not self.is_over.wait(self._pause_seconds):
            self._take()

    def _take(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._read())
