"""DeviceUseSampler: the share of the time in which a GPU computed, as its driver says. Knows not what."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

PAUSE_SECONDS: Final = 0.2


class DeviceUseSampler:
    """The mean of what the driver answers within the block: each answer is over its last fraction of a second."""

    def __init__(self, read: Callable[[], float | None], pause_seconds: float = PAUSE_SECONDS) -> None:
        self._read = read
        self._pause_seconds = pause_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="device use", daemon=True)
        self._shares: list[float] = []

    @property
    def share(self) -> float:
        return sum(self._shares) / len(self._shares) if self._shares else 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(self._pause_seconds):
            share = self._read()
            if share is not None:  # else the driver could not tell
                self._shares.append(share)
