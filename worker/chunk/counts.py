"""Counters of a worker: how chunks arrived and ended, how long they were held, and what was busy meanwhile.

All are sums since the start of this process, as Prometheus expects of counters. Both classes are thread-safe.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from vectormill.jobs.bottleneck import DEVICE, HELD, STARVED
from vectormill.jobs.chunks import ClaimedChunk

# Bounds of the wait in seconds: from a worker that waited for the message to the time-out that repeats a
# dispatch.
DISPATCH_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# Bounds of seconds: from a chunk of one short text on a GPU to one of long texts on a CPU with others before
# it.
COMMIT_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DONE: Final = "done"
# These outcomes are reported as 0 from the start, since Prometheus sees no increase in a series that begins
# with 1.
WATCHED: Final = (DONE, "split", "lease lost")


class Histogram:
    """A histogram that reports its upper bounds with its counts, so that a reader need not know them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> dict[str, Any]:
        """Return bounds, counts and sum.

        There is a count for each bound and one for values above all bounds.
        """
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


class ChunkCounts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(WATCHED, 0))
        self._num_redispatched = 0
        self._num_stale = 0
        self._dispatch = Histogram(DISPATCH_SECONDS)
        self._commit = Histogram(COMMIT_SECONDS)
        self._waits: dict[int, str] = {}

    def note_claim(self, claimed: ClaimedChunk) -> None:
        with self._lock:
            if claimed.num_dispatches > 1:
                self._num_redispatched += 1
            if claimed.dispatch_seconds is not None:
                self._dispatch.add(claimed.dispatch_seconds)

    def note_stale_write(self) -> None:
        """Count a write that the fence rejected."""
        with self._lock:
            self._num_stale += 1

    def note_wait(self, chunk_id: int, reason: str | None) -> None:
        """Set the reason why a chunk's commit waits at the moment; None if it does not wait any more."""
        with self._lock:
            self._waits.pop(chunk_id, None)
            if reason is not None:
                self._waits[chunk_id] = reason

    @property
    def wait_reason(self) -> str | None:
        """Return the reason why one of the commits waits; None if none does."""
        with self._lock:
            return next(iter(self._waits.values()), None)

    def note_end(self, outcome: str, seconds: float) -> None:
        """Count a chunk's outcome. `seconds` is the time since its message arrived."""
        with self._lock:
            self._outcomes[outcome] += 1
            if outcome == DONE:
                self._commit.add(seconds)

    def totals(self) -> dict[str, Any]:
        """Return all counts since the start, for the worker's report."""
        with self._lock:
            return {
                "chunk_outcomes": dict(self._outcomes),
                "num_redispatched_chunks": self._num_redispatched,
                "num_stale_completions": self._num_stale,
                "dispatch_seconds": self._dispatch.describe(),
                "claim_to_commit_seconds": self._commit.describe(),
            }


@dataclass(slots=True)
class _Span:
    """The time since the last call of `take` in which at least one chunk was held."""

    since: Mapping[str, float]
    num_open: int = 0
    carried: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def take(self, now: Mapping[str, float]) -> dict[str, float]:
        taken = {name: seconds - self.since[name] for name, seconds in now.items()} | self.carried
        self.since = now
        self.carried.clear()
        return taken


class Timesheet:
    """Counts how long the worker holds chunks of each job, and how long its device and stages are busy.

    `read_device_seconds` returns how long the device has been computing since the start, and `read_starved_seconds` how
    long its threads have waited for a core.
    """

    def __init__(
        self,
        read_device_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        read_starved_seconds: Callable[[], float] | None = None,
    ) -> None:
        self._readers = {HELD: clock, DEVICE: read_device_seconds}
        if read_starved_seconds is not None:
            self._readers[STARVED] = read_starved_seconds
        self._lock = threading.Lock()
        self._jobs: dict[UUID, _Span] = {}
        self._whole: _Span | None = None  # for all jobs together; None while no chunk is held
        self._totals: dict[str, float] = defaultdict(float)

    @contextmanager
    def hold(self, job_id: UUID) -> Iterator[None]:
        """Count the time in the block as held for this job.

        Chunks that are held at the same time count once.
        """
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
        """Return a job's `held`, `device` and `starved` seconds and its carried seconds since the last call."""
        with self._lock:
            return self._jobs[job_id].take(self._read())

    def count(self, stage_seconds: Mapping[str, float]) -> None:
        """Add busy seconds to the worker's totals."""
        with self._lock:
            self._add(stage_seconds)

    def carry(self, job_id: UUID, stage: str, seconds: float) -> None:
        """Add busy seconds that were known too late for their chunk.

        The next chunk of the job reports them.
        """
        with self._lock:
            self._jobs[job_id].carried[stage] += seconds
            self._totals[stage] += seconds

    def totals(self) -> dict[str, float]:
        """Return the seconds of each stage since the start; `device` counts only while a chunk was held."""
        with self._lock:
            self._settle()
            return dict(self._totals)

    def _open(self) -> _Span:
        return _Span(self._read())

    def _read(self) -> dict[str, float]:
        return {name: read() for name, read in self._readers.items()}

    def _settle(self) -> None:
        if self._whole is not None:
            self._add(self._whole.take(self._read()))

    def _add(self, stage_seconds: Mapping[str, float]) -> None:
        for stage, seconds in stage_seconds.items():
            self._totals[stage] += seconds
