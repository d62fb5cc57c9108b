"""ChunkLedger: how many chunks came and how they ended, how long messages and work took. Knows neither texts nor jobs.

Sums since the start of this process, as Prometheus expects of counters. Threads meet here.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from vectormill.jobs.chunks.chunks import ClaimedChunk

# From a worker that was waiting for the message, to the time-out after which a dispatch is repeated.
DISPATCH_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# From a chunk of one short text on a GPU to one of long texts on a CPU that has others before it.
COMMIT_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DONE: Final = "done"
# Told as 0 from the start: Prometheus sees no increase in a series that begins with 1.
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
        """Return bounds, counts and sum. Each count belongs to one bound; the last one is above all bounds."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


class ChunkLedger:
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
        """Count a write that the fence refused."""
        with self._lock:
            self._num_stale += 1

    def note_wait(self, chunk_id: int, reason: str | None) -> None:
        """Note why the commit of a chunk waits at the moment; None when it does not any more."""
        with self._lock:
            self._waits.pop(chunk_id, None)
            if reason is not None:
                self._waits[chunk_id] = reason

    @property
    def wait_reason(self) -> str | None:
        """Return why one of the commits waits; None when none does."""
        with self._lock:
            return next(iter(self._waits.values()), None)

    def note_end(self, outcome: str, seconds: float) -> None:
        """Count how a chunk ended; `seconds` since its message arrived."""
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
