"""Timesheet: how long a worker holds chunks of each job, what its device does meanwhile, and its busy time by stage.

Knows neither chunks nor the database. Threads meet here.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from vectormill.jobs.bottleneck import DEVICE, HELD


@dataclass(slots=True)
class _Span:
    """The time since the last look in which at least one chunk was held."""

    since: float
    device_since: float
    num_open: int = 0
    carried: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def take(self, now: float, device_seconds: float) -> dict[str, float]:
        taken = {HELD: now - self.since, DEVICE: device_seconds - self.device_since, **self.carried}
        self.since, self.device_since = now, device_seconds
        self.carried.clear()
        return taken


class Timesheet:
    """`read_device_seconds` tells how long the device has been computing since the start."""

    def __init__(
        self, read_device_seconds: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read_device_seconds = read_device_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[UUID, _Span] = {}
        self._whole: _Span | None = None  # of all jobs together, while any chunk is held
        self._totals: dict[str, float] = defaultdict(float)

    @contextmanager
    def hold(self, job_id: UUID) -> Iterator[None]:
        """Count the time in the block as held. Chunks held at the same time count once."""
        with self._lock:
            span = self._jobs.setdefault(job_id, self._open())
            whole = self._whole = self._whole or self._open()
            span.num_open += 1
            whole.num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._settle()
                span.num_open -= 1
                whole.num_open -= 1
                if span.num_open == 0:
                    del self._jobs[job_id]
                if whole.num_open == 0:
                    self._whole = None

    def take(self, job_id: UUID) -> dict[str, float]:
        """Return a job's `held` and `device` seconds, and what was carried, since the last call."""
        with self._lock:
            return self._jobs[job_id].take(self._clock(), self._read_device_seconds())

    def count(self, stage_seconds: Mapping[str, float]) -> None:
        """Add busy seconds to the worker's totals."""
        with self._lock:
            self._add(stage_seconds)

    def carry(self, job_id: UUID, stage: str, seconds: float) -> None:
        """Add busy seconds that were known too late for their chunk; the job's next chunk reports them."""
        with self._lock:
            self._jobs[job_id].carried[stage] += seconds
            self._totals[stage] += seconds

    def totals(self) -> dict[str, float]:
        """Return the seconds of each stage since the start, with `held`, and `device` while something was held."""
        with self._lock:
            self._settle()
            return dict(self._totals)

    def _open(self) -> _Span:
        return _Span(self._clock(), self._read_device_seconds())

    def _settle(self) -> None:
        if self._whole is not None:
            self._add(self._whole.take(self._clock(), self._read_device_seconds()))

    def _add(self, stage_seconds: Mapping[str, float]) -> None:
        for stage, seconds in stage_seconds.items():
            self._totals[stage] += seconds
