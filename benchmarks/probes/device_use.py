"""DeviceUseSampler: the share of the time in which a GPU computed, as its driver says. Knows not what."""

import subprocess
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

PAUSE_SECONDS: Final = 0.2
QUERY_TIMEOUT_SECONDS: Final = 10.0


class DeviceUseSampler:
    """The mean of what the driver answers within the block: each answer is over its last fraction of a second."""

    def __init__(
        self, index: int, read: Callable[[int], float], pause_seconds: float = PAUSE_SECONDS
    ) -> None:
        self._index = index
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
            self._shares.append(self._read(self._index))


def read_device_use(index: int) -> float:
    """Between 0 and 1, of the GPU with this number; 0 when the driver does not answer."""
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_SECONDS, check=True
        )
        return int(done.stdout.strip()) / 100
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0
