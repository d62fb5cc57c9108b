"""WorkerReport: what a worker says of itself with each sign of life: what runs, why, how fast, and what bounds it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from vectormill.domain.bottleneck import find_bottleneck, share_stages
from worker.devices.detect import DeviceSampler
from worker.engine import Engine
from worker.timesheet import Timesheet


class WorkerReport:
    """Seconds and counts are sums since the start, so that a reader can take differences.

    `placement` is this worker's part of the plan, as JSON; it never changes.
    """

    def __init__(
        self,
        engine: Engine,
        timesheet: Timesheet,
        sampler: DeviceSampler,
        placement: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._timesheet = timesheet
        self._sampler = sampler
        self._placement = placement
        self._clock = clock
        self._started_at = clock()

    def compose(self) -> dict[str, Any]:
        """A JSON object for the workers table."""
        report = self._engine.report()
        # The engine knows its stages better: it counts chunks too that were not committed.
        stage_seconds = self._timesheet.totals() | report["stage_seconds"]
        seconds = self._clock() - self._started_at
        bottleneck = find_bottleneck(stage_seconds, seconds)
        return report | {
            "placement": self._placement,
            "uptime_seconds": seconds,
            "stage_seconds": stage_seconds,
            "stage_shares": share_stages(stage_seconds, seconds),
            "bound_by": asdict(bottleneck) if bottleneck else None,
            **{f"device_{name}": value for name, value in asdict(self._sampler.sample()).items()},
        }
