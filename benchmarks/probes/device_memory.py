"""DeviceMemorySampler: how much memory of a GPU is taken while something happens. Knows nothing of who takes it."""

import subprocess
from collections.abc import Callable
from typing import Final

from benchmarks.probes.peak import PeakSampler

PAUSE_SECONDS: Final = 0.2
QUERY_TIMEOUT_SECONDS: Final = 10.0
MIB: Final = 1 << 20


class DeviceMemorySampler(PeakSampler):
    """Bytes taken of one GPU, which nothing else may use meanwhile.

    Asked of the driver, as a container does not see the processes of its device by their own numbers. `read` answers
    the bytes now.
    """

    def __init__(self, read: Callable[[], int], pause_seconds: float = PAUSE_SECONDS) -> None:
        super().__init__(read, pause_seconds)


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
