"""Feed: which batch the runner gets next, and when. Knows no runner, only moments; whoever shares it holds a lock.

Bulk waits until it can fill a batch, as long as the runner has something to do. An interactive request never waits, and
while such requests come, bulk batches are short, because one of them is always being encoded when the next one comes.
"""

import math
from typing import Final

from worker.batching.pace import Pace
from worker.batching.patience import find_hold_end
from worker.batching.pool import SequencePool
from worker.batching.sequence import Sequence

# On a small CPU a full batch takes a quarter of a second. While interactive requests come, and this long after the last
# one, the bulk batches that are at work take no longer than this, one behind or beside the other. Throughput hardly
# falls: budgets of 768 to 2,048 tokens were equally fast there, and a GPU encodes its whole budget in less.
INTERACTIVE_SECONDS: Final = 60.0
SHORT_BULK_SECONDS: Final = 0.05


class Feed:
    """Takes batches from a pool at the right moment. All moments are on one clock that never goes back."""

    def __init__(self, pool: SequencePool) -> None:
        self._pool = pool
        self._pace = Pace()
        self._interactive_at = -math.inf
        self._held_since: float | None = None
        self.num_started = 1  # batches that the runner has at work, beside or behind one another
        self.num_tokenizing = 0  # requests whose sequences will be here soon
        self.hold_end: float | None = None  # when the little that is held back is sent; None if nothing is

    def forget_pace(self) -> None:
        """Costs mean something else from now on."""
        self._pace = Pace()

    def note_interactive(self, now: float) -> None:
        self._interactive_at = now

    def note_encoded(self, sequences: tuple[Sequence, ...], seconds: float, now: float) -> None:
        self._pace.note_encoded(self._pool.cost_of(sequences), seconds, now)

    def take(self, now: float, *, is_runner_idle: bool) -> list[Sequence]:
        """The next batch; empty when nothing waits, or when it is held back until `hold_end`."""
        if is_runner_idle:
            self._pace.note_idle(now)
        is_interrupted = now - self._interactive_at < INTERACTIVE_SECONDS
        short_seconds = SHORT_BULK_SECONDS / self.num_started
        max_bulk_cost = self._pace.cost_within(short_seconds) if is_interrupted else math.inf
        if self._pool.has_interactive or self._pool.can_fill_batch(max_bulk_cost) or not self._hold(now):
            return self._sent(self._pool.take_batch(max_bulk_cost), now)
        return []

    def take_urgent(self, now: float) -> list[Sequence]:
        """The next batch if an interactive request leads it, else an empty one."""
        return self._sent(self._pool.take_urgent_batch(), now)

    def _hold(self, now: float) -> bool:
        """Whether what waits, which does not fill a batch, is held back still."""
        if not len(self._pool):
            self._held_since = self.hold_end = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        end = find_hold_end(self._pace.free_at, self._held_since, is_tokenizing=self.num_tokenizing > 0)
        self.hold_end = end if now < end else None
        return now < end

    def _sent(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        if sequences:
            self._held_since = self.hold_end = None
            self._pace.note_sent(self._pool.cost_of(sequences), now)
        return sequences
