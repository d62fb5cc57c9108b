"""DeviceUseSampler: the share of the time in which a GPU computed, as its driver says. Knows not what."""

from collections.abc import Callable
from typing import Final

from benchmarks.probes.alongside import Alongside

PAUSE_SECONDS: Final = 0.2


class DeviceUseSampler(Alongside):
    """The mean of what the driver answers within the block: each answer is over its last fraction of a second."""

    def __init__(self, read: Callable[[], float | None], pause_seconds: float = PAUSE_SECONDS) -> None:
        super().__init__("device use")
        self._read = read
        self._pause_seconds = pause_seconds
        self._shares: list[float] = []

    @property
    def share(self) -> float:
        return sum(self._shares) / len(self._shares) if self._shares else 0.0

    def run(self) -> None:
        while not self.is_over.wait(self._pause_seconds):
            share = self._read()
            if share is not None:  # else the driver could not tell
                self._shares.append(share)
