"""A CPU's streams, simulated: the worker's own pool and feed decide, and a model of time says how long batches take.

No clock and no thread: the same lengths give the same seconds. What is modelled of a batch is what was measured of
them: decision 0015 has the rate of a core for batches of 512 and of 1,024 tokens, docs/LOG.md what they cost beside.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.batching.cost import LengthBuckets, PaddedCost
from worker.batching.feed import Feed
from worker.batching.limits import BatchLimits
from worker.batching.pool import SequencePool
from worker.batching.sequences import Sequences
from worker.runner.messages import BATCHES_AHEAD

TOKENS_PER_SECOND: Final = 4275.0  # of a core with a stream of its own, in tokens of short sequences
BATCH_SECONDS: Final = 0.0015  # beside its tokens
TOKENIZE_SECONDS: Final = 3e-7  # a token, after which its chunk is in the pool
QUADRATIC_LENGTH: Final = 2304.0  # of MiniLM-L6
LONGEST: Final = 256
NUM_SLOTS: Final = 16


@dataclass(slots=True)
class Simulated:
    """`idle_seconds` are those of all streams between the first batch's start and the last one's end."""

    num_tokens: int
    seconds: float = 0.0
    idle_seconds: float = 0.0
    shapes: list[tuple[int, int]] = field(
        default_factory=list
    )  # sequences and tokens of each batch, in order

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def simulate(chunks: Sequence[NDArray[np.int64]], num_streams: int = 2, budget: int = 1024) -> Simulated:
    """Encodes chunks of sequences of these lengths, as many at a time as a worker has slots."""
    return _Simulation(chunks, num_streams, budget).run()


class _Simulation:
    def __init__(self, chunks: Sequence[NDArray[np.int64]], num_streams: int, budget: int) -> None:
        self._chunks = chunks
        self._left = [len(lengths) for lengths in chunks]  # sequences of each that have no vector yet
        self._waiting = iter(range(len(chunks)))
        self._pool = SequencePool(BatchLimits(budget), PaddedCost(QUADRATIC_LENGTH, LengthBuckets(LONGEST)))
        self._feed = Feed(self._pool)
        self._feed.num_started = self._feed.num_streams = num_streams
        self._free_at = [0.0] * num_streams
        self._sent: list[Sequences] = []  # and not yet begun
        self._num_outside = 0
        # Moment, order, and what is done then: a chunk is tokenized, or a batch is computed.
        self._events: list[tuple[float, int, int | Sequences]] = []
        self._order = itertools.count()
        self._begun_at = -1.0
        self._busy_seconds = 0.0
        self._found = Simulated(int(sum(int(lengths.sum()) for lengths in chunks)))

    def run(self) -> Simulated:
        now = 0.0
        for _ in range(NUM_SLOTS):
            self._take_chunk(now)
        while self._events or self._sent or len(self._pool):
            self._send_ahead(now)
            self._begin(now)
            now = max(now, self._next_moment())
            while self._events and self._events[0][0] <= now:
                *_, done = heapq.heappop(self._events)
                if isinstance(done, Sequences):
                    self._end(done, now)
                else:
                    self._feed.num_tokenizing -= 1
                    self._pool.add(done, self._chunks[done])
        self._found.seconds = now
        self._found.idle_seconds = len(self._free_at) * (now - self._begun_at) - self._busy_seconds
        return self._found

    def _take_chunk(self, now: float) -> None:
        number = next(self._waiting, None)
        if number is not None:
            self._feed.num_tokenizing += 1
            self._happens(now + TOKENIZE_SECONDS * float(self._chunks[number].sum()), number)

    @property
    def _has_room(self) -> bool:
        return self._num_outside < len(self._free_at) + BATCHES_AHEAD

    def _send_ahead(self, now: float) -> None:
        while self._has_room and len(batch := self._feed.take(now, is_runner_idle=not self._num_outside)):
            self._num_outside += 1
            self._sent.append(batch)

    def _begin(self, now: float) -> None:
        while self._sent and min(self._free_at) <= now:
            batch = self._sent.pop(0)
            seconds = self._seconds_of(batch)
            self._begun_at = now if self._begun_at < 0 else self._begun_at
            self._free_at[self._free_at.index(min(self._free_at))] = now + seconds
            self._busy_seconds += seconds
            self._found.shapes.append((len(batch), batch.max_length))
            self._happens(now + seconds, batch)

    def _end(self, batch: Sequences, now: float) -> None:
        self._num_outside -= 1
        self._feed.note_encoded(batch, self._seconds_of(batch) / len(self._free_at), now)
        for request, rows in batch.sorted_by_request().by_request():
            self._left[request] -= rows.stop - rows.start
            if not self._left[request]:
                self._take_chunk(now)

    def _seconds_of(self, batch: Sequences) -> float:
        return BATCH_SECONDS + self._pool.cost_of(batch) / TOKENS_PER_SECOND

    def _happens(self, moment: float, what: int | Sequences) -> None:
        heapq.heappush(self._events, (moment, next(self._order), what))

    def _next_moment(self) -> float:
        moments = [self._events[0][0]] if self._events else []
        if self._feed.hold_end is not None and self._has_room:
            moments.append(self._feed.hold_end)
        return min(moments)
