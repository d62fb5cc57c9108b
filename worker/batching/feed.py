"""Feed: which batch the runner gets next, and when. Knows no runner, only moments; whoever shares it holds a lock.

Bulk waits until it can fill a batch, as long as the runner has something to do. An interactive request never waits, and
while such requests come, bulk batches are short, because one of them is always being encoded when the next one comes.
"""

import math
from typing import Final

from worker.batching.pool import SequencePool
from worker.batching.sequences import Sequences

# On a small CPU a full batch takes a quarter of a second. While interactive requests come, and this long after the last
# one, the bulk batches that are at work take no longer than this, one behind or beside the other. Throughput hardly
# falls: budgets of 768 to 2,048 tokens were equally fast there, and a GPU encodes its whole budget in less.
INTERACTIVE_SECONDS: Final = 60.0
SHORT_BULK_SECONDS: Final = 0.05
# The last batches of a job are cut so that streams end together, but not to less than this part of a full one: batches
# of 256 tokens were not as fast as those of 512 on every processor (docs/LOG.md).
SMALLEST_LAST_SHARE: Final = 1 / 4
# How much less a batch counts for the pace than the next one: about the last eight do.
FADING: Final = 0.875
# Before the runner is out of work: a batch is taken from the pool, sent and read in 1 to 2 ms.
LEAD_SECONDS: Final = 0.003
# A chunk of 512 short texts is tokenized in 5 to 10 ms, a request of one in less than 1 ms. To let a device stand still
# for longer costs more than the batch after next, which would be fuller, could bring in again.
TOKENIZING_SECONDS: Final = 0.005


class Pace:
    """A forecast of when the runner will be out of work. Whoever relies on it must be right, if slower, when it is
    wrong.
    """

    def __init__(self) -> None:
        # Sums over the last batches. Their sums, not the mean of their ratios: a tiny batch takes long for what it
        # costs.
        self._cost = 0.0
        self._seconds = 0.0
        self._cost_ahead = 0.0
        self._free_at = -math.inf

    @property
    def free_at(self) -> float:
        """Return when the runner will have encoded all that was sent; in the past when it is idle."""
        return self._free_at

    def cost_within(self, seconds: float) -> float:
        """Return the cost that is encoded in this time; infinite until a batch has come back."""
        return seconds / self._seconds_of(1) if self._seconds else math.inf

    def note_sent(self, cost: float, now: float) -> None:
        self._cost_ahead += cost
        self._free_at = max(now, self._free_at) + self._seconds_of(cost)

    def note_encoded(self, cost: float, seconds: float, now: float) -> None:
        self._cost = FADING * self._cost + cost
        self._seconds = FADING * self._seconds + seconds
        self._cost_ahead = max(0.0, self._cost_ahead - cost)
        self._free_at = now + self._seconds_of(self._cost_ahead)

    def note_idle(self, now: float) -> None:
        """Note that the runner has nothing: batches that failed or were lost are no longer ahead."""
        self._cost_ahead = 0.0
        self._free_at = min(self._free_at, now)

    def _seconds_of(self, cost: float) -> float:
        return cost * self._seconds / self._cost if self._cost else 0.0


class Feed:
    """Takes batches from a pool at the right moment. All moments are on one clock that never goes back."""

    def __init__(self, pool: SequencePool) -> None:
        self._pool = pool
        self._pace = Pace()
        self._interactive_at = -math.inf
        self._held_since: float | None = None
        self.num_started = 1  # batches that the runner has at work, beside or behind one another
        self.num_streams = 1  # of these, how many are computed side by side
        self.num_tokenizing = 0  # requests whose sequences will be here soon
        self.hold_end: float | None = None  # when the little that is held back is sent; None if nothing is

    def forget_pace(self) -> None:
        """Forget the measured pace, because costs have another meaning from now on."""
        self._pace = Pace()

    def note_interactive(self, now: float) -> None:
        self._interactive_at = now

    def note_encoded(self, sequences: Sequences, seconds: float, now: float) -> None:
        self._pace.note_encoded(self._pool.cost_of(sequences), seconds, now)

    def take(self, now: float, *, is_runner_idle: bool, only_urgent: bool = False) -> Sequences:
        """Return the next batch; empty when nothing waits, or when it is held back until `hold_end`. With `only_urgent`
        an interactive request leads it.
        """
        if only_urgent:
            return self._sent(self._pool.take_batch(only_urgent=True), now)
        if is_runner_idle:
            self._pace.note_idle(now)
        is_interrupted = now - self._interactive_at < INTERACTIVE_SECONDS
        short_seconds = SHORT_BULK_SECONDS / self.num_started
        max_bulk_cost = self._pace.cost_within(short_seconds) if is_interrupted else math.inf
        if self._pool.has_interactive or self._pool.can_fill_batch(max_bulk_cost) or not self._hold(now):
            return self._sent(self._pool.take_batch(min(max_bulk_cost, self._share_of_last())), now)
        return Sequences.join([])

    def _share_of_last(self) -> float:
        """Return what a batch may cost when the remaining bulk fills less than one for each stream: an equal part."""
        if self.num_streams == 1 or self.num_tokenizing:
            return math.inf
        cost, budget = self._pool.bulk_cost, self._pool.bulk_budget
        if cost >= self.num_streams * budget:
            return math.inf
        return max(cost / self.num_streams, SMALLEST_LAST_SHARE * budget)

    def _hold(self, now: float) -> bool:
        """Return True if a batch that is not full is still held back."""
        if not len(self._pool):
            self._held_since = self.hold_end = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        end = find_hold_end(self._pace.free_at, self._held_since, is_tokenizing=self.num_tokenizing > 0)
        self.hold_end = end if now < end else None
        return now < end

    def _sent(self, sequences: Sequences, now: float) -> Sequences:
        if len(sequences):
            self._held_since = self.hold_end = None
            self._pace.note_sent(self._pool.cost_of(sequences), now)
        return sequences


def find_hold_end(free_at: float, held_since: float, *, is_tokenizing: bool) -> float:
    """Return the moment at which a batch is sent even if it is not full.

    `free_at` is when the runner has nothing left to do, foreseen or past. Until shortly before, waiting costs nothing;
    a little longer pays if texts are being tokenized, which are likely to fill it.
    """
    if is_tokenizing:
        return max(free_at, held_since) + TOKENIZING_SECONDS
    return free_at - LEAD_SECONDS
