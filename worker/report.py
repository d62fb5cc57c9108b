"""WorkerReport: what a worker says of itself with each heartbeat: what runs, why, how fast, and what bounds it.

ReportMaker makes it on a thread of its own: it asks drivers and files, which may hang, and leases must not.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, Final

from vectormill.jobs.bottleneck import find_bottleneck, share_stages
from vectormill.workers.samples import MIB, MOST_SAMPLES, RECENT, SAMPLE_SECONDS, Sample, write_samples
from worker.chunk.ledger import ChunkLedger, Timesheet
from worker.devices.detect import DeviceSampler, DeviceUse
from worker.engine.engine import Engine

logger = logging.getLogger(__name__)

# A driver that answers makes a report in milliseconds; so old it is only when one hangs.
LATE_SECONDS = 60.0
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


class WorkerReport:
    """Composes a worker's report. Seconds and counts are sums since the start, so that a reader can take differences.

    `placement` is this worker's part of the plan, as JSON; it never changes.
    """

    def __init__(
        self,
        engine: Engine,
        timesheet: Timesheet,
        sampler: DeviceSampler,
        placement: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        ledger: ChunkLedger | None = None,
    ) -> None:
        self._engine = engine
        self._ledger = ledger or ChunkLedger()
        self._timesheet = timesheet
        self._sampler = sampler
        self._placement = placement
        self._clock = clock
        self._started_at = clock()
        self._recent = Recent(clock)

    def compose(self) -> dict[str, Any]:
        """Return a JSON object for the workers table."""
        report = self._engine.report()
        # The engine knows its stages better: it counts chunks too that were not committed.
        stage_seconds = self._timesheet.totals() | report["stage_seconds"]
        seconds = self._clock() - self._started_at
        bottleneck = find_bottleneck(stage_seconds, seconds)
        if (reason := self._ledger.wait_reason) is not None:
            report |= {"state": "waiting to commit", "state_reason": reason}
        use = self._sampler.sample()
        self._recent.note(report.get("num_tokens", 0), use)
        return report | {
            **self._ledger.totals(),
            "placement": self._placement,
            "uptime_seconds": seconds,
            "stage_seconds": stage_seconds,
            "stage_shares": share_stages(stage_seconds, seconds),
            "bound_by": asdict(bottleneck) if bottleneck else None,
            **{f"device_{name}": value for name, value in asdict(use).items()},
            RECENT: self._recent.write(),
        }


class ReportMaker:
    """Makes a report every so many seconds; `latest` answers at once with the last one that was made."""

    def __init__(
        self,
        compose: Callable[[], Mapping[str, Any]],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compose = compose
        self._seconds = seconds
        self._clock = clock
        self._latest: Mapping[str, Any] = {}
        self._made_at = clock()
        self._is_late = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop without waiting for the thread: it may hang in a driver, and ends with the process."""
        self._stopping.set()

    def latest(self) -> Mapping[str, Any]:
        is_late = self._clock() - self._made_at > LATE_SECONDS
        if is_late and not self._is_late:
            logger.warning(
                "This worker's report is %.0f s old: a driver or a disk that it asks does not answer.",
                LATE_SECONDS,
            )
        self._is_late = is_late
        return self._latest

    def make(self) -> Mapping[str, Any]:
        """Make a report now. Raises whatever drivers raise."""
        self._latest = self._compose()
        self._made_at = self._clock()
        return self._latest

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self.make()
            except Exception:  # of any driver or file: the next report may be made again
                logger.exception("The report could not be made; the last one stays.")
