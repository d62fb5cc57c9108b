"""Recent: what a worker's last ten minutes were like, a sample every ten seconds. Asks no device; is told."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from vectormill.workers.samples import MIB, MOST_SAMPLES, SAMPLE_SECONDS, Sample, write_samples
from worker.devices.detect import DeviceUse

# After a driver has hung for so long samples would not be evenly spaced any more: they begin anew.
GAP_SECONDS: Final = 120.0


class Recent:
    """Samples of the last ten minutes. `note` is called at every report, which is more often. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: deque[tuple[float, Sample]] = deque(maxlen=MOST_SAMPLES)
        self._busy: list[float] = []  # since the last sample
        self._taken_at = clock()
        self._num_tokens = 0

    def note(self, num_tokens: int, use: DeviceUse) -> None:
        """Note the sum of encoded tokens since the start and the device's use now."""
        if use.utilisation is not None:
            self._busy.append(use.utilisation)
        now = self._clock()
        seconds = now - self._taken_at
        if seconds < SAMPLE_SECONDS:
            return
        if seconds > GAP_SECONDS:
            self._taken.clear()
        used = use.memory_used_bytes
        sample = Sample(
            0.0,
            (num_tokens - self._num_tokens) / seconds,
            None if used is None else used // MIB,
            round(100 * fmean(self._busy)) if self._busy else None,
        )
        self._taken.append((now, sample))
        self._taken_at, self._num_tokens, self._busy = now, num_tokens, []

    def write(self) -> dict[str, list[Any]]:
        """Return the samples as they go into a report."""
        now = self._clock()
        return write_samples([replace(sample, seconds_ago=now - at) for at, sample in self._taken])
