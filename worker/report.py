"""The report that a worker sends with each heartbeat: what runs, why, how fast, and what limits its speed.

ReportMaker makes reports on a separate thread: drivers and files that it reads may hang, and leases must
still be renewed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from vectormill.jobs.bottleneck import find_bottleneck, share_stages
from vectormill.workers.samples import MIB, MOST_SAMPLES, RECENT, SAMPLE_SECONDS, Sample, write_samples
from worker.chunk.counts import ChunkCounts, Timesheet
from worker.devices.detect import DeviceSampler, DeviceUse, join_uses
from worker.engine.engine import Engine

logger = logging.getLogger(__name__)

# Drivers normally answer in milliseconds, so a report gets this old only if a driver hangs.
LATE_SECONDS = 60.0
# If a driver has hung for this long, samples would no longer be evenly spaced, so they start over.
GAP_SECONDS: Final = 120.0


class RecentSamples:
    """Samples of the last ten minutes. Not thread-safe.

    `note` is called for every report, which is more often than samples are taken.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: deque[tuple[float, Sample]] = deque(maxlen=MOST_SAMPLES)
        self._busy: list[float] = []  # utilisation, since the last sample
        self._taken_at = clock()
        self._num_tokens = 0

    def note(self, num_tokens: int, use: DeviceUse) -> None:
        """Record the number of tokens encoded since the start and the current use of the device."""
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
        """Return the samples in the form of the report."""
        now = self._clock()
        return write_samples([replace(sample, seconds_ago=now - at) for at, sample in self._taken])


def read_losses(path: Path | None) -> list[str]:
    """Return the launcher's line for each lost GPU, as long as it is lost."""
    with suppress(OSError):
        return path.read_text().splitlines() if path else []
    return []  # nothing was ever lost


class WorkerReport:
    """Composes a worker's report.

    Seconds and counts are sums since the start, so that readers can subtract them. `samplers` are those of the worker's
    devices, by name. `placement` is this worker's part of the plan, as JSON; to its reasons is added what `losses` says
    of lost GPUs.
    """

    def __init__(
        self,
        engine: Engine,
        timesheet: Timesheet,
        samplers: Mapping[str, DeviceSampler],
        placement: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        counts: ChunkCounts | None = None,
        losses: Callable[[], list[str]] = list,
    ) -> None:
        self._losses = losses
        self._engine = engine
        self._counts = counts or ChunkCounts()
        self._timesheet = timesheet
        self._samplers = samplers
        self._placement = placement
        self._clock = clock
        self._started_at = clock()
        self._recent = RecentSamples(clock)

    def compose(self) -> dict[str, Any]:
        """Return the report as a JSON object for the workers table."""
        report = self._engine.report()
        # For its own stages, the engine's seconds are better: they include chunks that were not committed.
        stage_seconds = self._timesheet.totals() | report["stage_seconds"]
        seconds = self._clock() - self._started_at
        bottleneck = find_bottleneck(stage_seconds, seconds)
        if (reason := self._counts.wait_reason) is not None:
            report |= {"state": "waiting to commit", "state_reason": reason}
        uses = {name: sampler.sample() for name, sampler in self._samplers.items()}
        use = join_uses(list(uses.values()))
        devices = [{"name": name, **asdict(each)} for name, each in uses.items()]
        self._recent.note(report.get("num_tokens", 0), use)
        lost, plan = self._losses(), self._placement.get("plan")
        told = {"plan": {**plan, "reasons": [*lost, *plan["reasons"]]}} if lost and plan else {}
        return report | {
            **self._counts.totals(),
            "placement": {**self._placement, **told},
            "lost_devices": lost,
            "uptime_seconds": seconds,
            "stage_seconds": stage_seconds,
            "stage_shares": share_stages(stage_seconds, seconds),
            "bound_by": asdict(bottleneck) if bottleneck else None,
            **{f"device_{name}": value for name, value in asdict(use).items()},
            **({"devices": devices} if len(devices) > 1 else {}),
            RECENT: self._recent.write(),
        }


class ReportMaker:
    """Makes a report every `seconds`; `latest` returns the last one at once."""

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
        """Stop without waiting for the thread, which may hang in a driver. It ends with the process."""
        self._stopping.set()

    def latest(self) -> Mapping[str, Any]:
        is_late = self._clock() - self._made_at > LATE_SECONDS
        if is_late and not self._is_late:
            logger.warning(
                "This worker's report is %.0f s old, because a driver or a disk is not responding.",
                LATE_SECONDS,
            )
        self._is_late = is_late
        return self._latest

    def make(self) -> Mapping[str, Any]:
        """Make a report now and return it. Errors of drivers are raised."""
        self._latest = self._compose()
        self._made_at = self._clock()
        return self._latest

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self.make()
            except Exception:  # any driver or file may fail, and the next report may succeed
                logger.exception("Could not make a report; keeping the previous one.")
