"""DeviceMemorySampler: how much memory of a GPU is taken while something happens. Knows nothing of who takes it."""

import subprocess
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

PAUSE_SECONDS: Final = 0.2
QUERY_TIMEOUT_SECONDS: Final = 10.0
MIB: Final = 1 << 20


class DeviceMemorySampler:
    """Bytes taken of one GPU, above those before the block, at most within it: nothing else may use it meanwhile.

    Asked of the driver, as a container does not see the processes of its device by their own numbers. `read` answers
    the bytes now.
    """

    def __init__(self, read: Callable[[], int], pause_seconds: float = PAUSE_SECONDS) -> None:
        self._read = read
        self._pause_seconds = pause_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="device memory sampler", daemon=True)
        self._before_bytes = 0
        self._peak_bytes = 0

    @property
    def growth_bytes(self) -> int:
        return self._peak_bytes - self._before_bytes

    def __enter__(self) -> Self:
        self._before_bytes = self._peak_bytes = self._read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(self._pause_seconds):
            self._peak_bytes = max(self._peak_bytes, self._read())


def read_device_bytes(index: int) -> int:
    """Memory in use of the GPU with this number; 0 when the driver does not answer."""
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_SECONDS, check=True
        )
        return int(done.stdout.strip()) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
