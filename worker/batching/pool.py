"""SequencePool holds the waiting sequences of one model, and decides which batch of them is next, and when.

It knows nothing about devices, tokens or threads: its user holds a lock. The next batch is built around an
*anchor*, the longest waiting sequence of the oldest request. It is filled with the sequences nearest in
length, of any request, first the shorter ones, then the longer ones. So the oldest chunk is finished first,
later chunks are encoded while it is written to the database, and a batch pads little, because sequences of
all chunks in flight are candidates.

Bulk waits until it can fill a batch, as long as the device has work. Interactive requests never wait: they
come before all others, in short batches. While they arrive, bulk batches are short too, because one of them
is usually being encoded when the next interactive request arrives.

Nothing loops over single sequences: adding a request takes one step for each of its lengths, and building a
batch takes one for each length that it visits and each request that it takes from.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from worker.batching.batch import Sequences
from worker.batching.cost import BatchCost

# The number of interactive batches in a row while bulk waits. Then one bulk batch goes first, so that a flood
# of interactive requests does not starve bulk. Eight interactive batches take about as long as two bulk
# batches, so at most one bulk batch delays interactive requests in that time.
MAX_INTERACTIVE_IN_ROW: Final = 8
# On a small CPU a full batch takes a quarter of a second. While interactive requests arrive, and for
# INTERACTIVE_SECONDS after the last one, the bulk batches on the device take no longer than
# SHORT_BULK_SECONDS together. Throughput hardly falls: budgets of 768 to 2,048 tokens were equally fast
# there, and a GPU encodes its whole budget in less.
INTERACTIVE_SECONDS: Final = 60.0
SHORT_BULK_SECONDS: Final = 0.05
# The last batches of a job are divided so that all streams end together, but not below this share of a full
# batch: batches of 256 tokens were slower than those of 512 on some processors (docs/LOG.md).
SMALLEST_LAST_SHARE: Final = 1 / 4
# The factor by which a batch counts less for the pace than the next one, so that about the last eight matter.
FADING: Final = 0.875
# A batch is sent this long before the runner is out of work: it takes 1 to 2 ms to take it from the pool,
# send and read it.
LEAD_SECONDS: Final = 0.003
# How long an idle device waits for texts that are being tokenized. A chunk of 512 short texts is tokenized in
# 5 to 10 ms, a request of one text in less than 1 ms. Idling longer costs more than a fuller batch could
# save.
TOKENIZING_SECONDS: Final = 0.005


# Returns the largest cost of a batch whose longest sequence has this many tokens. It is called for every
# batch, so the budget can be tuned while the engine runs.
BudgetSource = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on the size of a batch, and on padding where the kernel pads.

    `max_batch_tokens` is the largest cost of a batch (`worker.batching.cost`) unless a BudgetSource overrides
    it.

    In one batch, padding is at most `max_padding_share` of what is computed or `min_padding_tokens`,
    whichever is more: below that, one batch more would cost the device more than the padding does. Over all
    batches, padding is at most `mean_padding_share`, in addition to the padding of sequences when they are
    alone. Batches that pad less save up to `max_saved_tokens` for later batches that pad more. Where padding
    is counted in squares of lengths, a share of tokens is about twice as large a share of squares: both
    shares are multiplied by `square_factor`, and numbers of tokens are converted at the length of the longest
    sequence.

    An interactive batch has at most `urgent_share` of the budget, because someone waits for it, and others
    may arrive meanwhile. Bulk sequences fill it up to `top_up_share`: a GPU needs as long for 2,000 tokens as
    for ten, a CPU 10 ms for 128. While interactive requests arrive, bulk batches are short as well, but never
    below `shortest_bulk_share`.
    """

    max_batch_tokens: int
    max_padding_share: float = 0.05
    min_padding_tokens: int = 64
    mean_padding_share: float = 0.025
    max_saved_tokens: int = 256
    square_factor: float = 1.6
    urgent_share: float = 1 / 4
    top_up_share: float = 1 / 16
    shortest_bulk_share: float = 1 / 8


class OpenBatch:
    """A batch that is being filled. It begins empty, and the first sequence always fits."""

    def __init__(self, limits: BatchLimits, cost: BatchCost, saved_padding: float) -> None:
        self._limits = limits
        self._cost = cost
        self._saved_padding = saved_padding
        self._parts: list[tuple[int, NDArray[np.int32], int]] = []  # request, positions, length
        self.num_sequences = 0
        self.max_length = 0
        self._sum_of_costs = 0.0  # of the sequences, each as if alone
        self._sum_of_weights = 0  # in the units in which padding is counted

    @property
    def saved_padding(self) -> float:
        """Return the padding that later batches may use, after this batch has saved or used some.

        Never negative.
        """
        if not self._cost.pads:
            return self._saved_padding
        num_computed = self._cost.weigh(self.max_length) * self.num_sequences
        allowed = self._mean_padding_share(self.max_length) * num_computed
        saved = self._saved_padding + allowed - (num_computed - self._sum_of_weights)
        return min(saved, self._limits.max_saved_tokens * self._weight_of_token(self.max_length))

    def count_fitting(self, length: int, num_waiting: int, budget: float) -> int:
        """Return how many waiting sequences of this length can join within budget and padding limits."""
        max_length = max(self.max_length, length)
        cost_alone = self._cost.of_sequence(length)
        within_budget = bisect_right(
            range(1, num_waiting + 1),
            budget,
            key=lambda count: self._cost.of_batch(
                self.num_sequences + count, max_length, self._sum_of_costs + count * cost_alone
            ),
        )
        fitting = (
            within_budget if not self._cost.pads else self._count_padded(length, max_length, within_budget)
        )
        return max(fitting, int(not self.num_sequences))

    def _count_padded(self, length: int, max_length: int, num_waiting: int) -> int:
        """Return how many sequences of this length can join before one would cause too much padding."""
        mean_share, share = (
            self._mean_padding_share(max_length),
            self._factor * self._limits.max_padding_share,
        )
        least = self._limits.min_padding_tokens * self._weight_of_token(max_length)
        weight, weight_alone = self._cost.weigh(max_length), self._cost.weigh(length)

        def is_too_much(count: int) -> bool:
            num_computed = weight * (self.num_sequences + count)
            padding = num_computed - self._sum_of_weights - count * weight_alone
            return padding > min(
                max(least, share * num_computed), self._saved_padding + mean_share * num_computed
            )

        # All of these are linear in the count: the padding, what a batch may pad, and what is allowed on the
        # mean of all batches.
        computed_at_0 = weight * self.num_sequences
        slope, at_0 = weight - weight_alone, computed_at_0 - self._sum_of_weights
        above_mean = find_first_positive(
            at_0 - self._saved_padding - mean_share * computed_at_0, slope - mean_share * weight, 1
        )
        above_least = find_first_positive(at_0 - least, slope, 1)
        above_both = find_first_positive(at_0 - share * computed_at_0, slope - share * weight, above_least)
        fitting = int(min(above_mean - 1, above_both - 1, num_waiting))
        # Arithmetic in another order rounds differently, so check the neighbours.
        while fitting and is_too_much(fitting):
            fitting -= 1
        while fitting < num_waiting and not is_too_much(fitting + 1):
            fitting += 1
        return fitting

    def _mean_padding_share(self, max_length: int) -> float:
        """Return the allowed mean share of padding, in addition to that of sequences when they are alone."""
        return max(0.0, self._factor * self._limits.mean_padding_share - self._cost.padding_share(max_length))

    @property
    def _factor(self) -> float:
        """Return the factor by which shares of padding are multiplied; 1 if padding is counted in tokens."""
        return self._limits.square_factor if self._cost.weigh(2) > 2 else 1.0

    def _weight_of_token(self, max_length: int) -> float:
        """Return the weight of one token in a sequence of this length."""
        return self._cost.weigh(max_length) / max_length if max_length else 1.0

    def append(self, taken: list[tuple[int, NDArray[np.int32]]], length: int) -> None:
        """Add sequences of one length, given as requests with their positions."""
        count = sum(len(positions) for _, positions in taken)
        self._parts += [(request, positions, length) for request, positions in taken]
        self.num_sequences += count
        self.max_length = max(self.max_length, length)
        self._sum_of_costs += count * self._cost.of_sequence(length)
        self._sum_of_weights += count * self._cost.weigh(length)

    def close(self) -> Sequences:
        """Return the sequences of the batch in the order in which they joined."""
        counts = [len(positions) for _, positions, _ in self._parts]
        lengths = np.repeat(np.array([length for *_, length in self._parts], np.int32), counts)
        return Sequences(
            np.repeat(np.array([request for request, *_ in self._parts], np.int64), counts),
            np.concatenate([np.zeros(0, np.int32), *(positions for _, positions, _ in self._parts)]),
            lengths,
            self._cost.of_sequences(lengths),
        )


def find_first_positive(at_0: float, slope: float, start: float) -> float:
    """Return the first whole n from `start` on with `at_0 + slope * n` > 0; infinite if there is none."""
    if start == math.inf or at_0 + slope * start > 0:
        return start
    return math.floor(-at_0 / slope) + 1 if slope > 0 else math.inf


@dataclass(slots=True)
class Segment:
    """Waiting sequences of one request that have the same length: positions[start:]."""

    request: int
    positions: NDArray[np.int32]
    start: int = 0

    def __len__(self) -> int:
        return len(self.positions) - self.start

    def take(self, num_sequences: int) -> NDArray[np.int32]:
        taken = self.positions[self.start : self.start + num_sequences]
        self.start += len(taken)
        return taken


@dataclass(slots=True)
class Line:
    """All waiting sequences of one length, with those of older requests in front."""

    segments: deque[Segment] = field(default_factory=deque)
    num_waiting: int = 0


class WaitingSequences:
    """The waiting sequences of all requests by length, with the oldest request. It forms no batches.

    Requests are added in order of age. Their sequences leave in part or all at once.
    """

    def __init__(self) -> None:
        # For each request, in order of arrival, the number of waiting sequences by length.
        self._requests: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._lines: dict[int, Line] = {}
        self._lengths: list[int] = []  # the keys of _lines, sorted
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, request: int, positions: NDArray[np.int32], lengths: NDArray[Any]) -> None:
        """Add the sequences of one request, at least one. The request must be younger than all others."""
        order = np.argsort(lengths, kind="stable")
        in_order, counts_by_length = lengths[order], {}
        positions = positions[order]
        starts = np.flatnonzero(np.diff(in_order, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            length = int(in_order[start])
            line = self._lines.get(length)
            if line is None:
                line = self._lines[length] = Line()
                insort(self._lengths, length)
            line.segments.append(Segment(request, positions[start:end]))
            line.num_waiting += end - start
            counts_by_length[length] = end - start
        self._requests[request] = counts_by_length
        self._num_waiting += len(order)

    def remove(self, request: int) -> dict[int, int]:
        """Remove a request's waiting sequences.

        Return how many there were of each length; empty if there were none.
        """
        removed = self._requests.pop(request, {})
        for length, count in removed.items():
            line = self._lines[length]
            line.segments = deque(segment for segment in line.segments if segment.request != request)
            self._leave(length, line, count)
        return removed

    def drain(self) -> list[tuple[int, NDArray[np.int32]]]:
        """Remove all sequences. Return requests with the positions that waited."""
        segments = [segment for line in self._lines.values() for segment in line.segments]
        self._requests.clear()
        self._lines.clear()
        self._lengths.clear()
        self._num_waiting = 0
        return [(segment.request, segment.positions[segment.start :]) for segment in segments]

    def longest_of_oldest(self) -> int:
        """Return the longest waiting length of the oldest request. Its sequences lead their line."""
        return max(next(iter(self._requests.values())))

    def shortest_of_oldest(self) -> int:
        return min(next(iter(self._requests.values())))

    def lengths_around(self, length: int) -> tuple[list[int], list[int]]:
        """Return the lengths up to this one, and the longer ones, both lists with the nearest first."""
        split = bisect_right(self._lengths, length)
        return self._lengths[:split][::-1], self._lengths[split:]

    def count(self, length: int) -> int:
        return self._lines[length].num_waiting

    def take(self, length: int, num_sequences: int) -> list[tuple[int, NDArray[np.int32]]]:
        """Remove the oldest sequences of this length. Return them as requests with positions."""
        line, taken, num_left = self._lines[length], [], num_sequences
        while num_left:
            segment = line.segments[0]
            positions = segment.take(num_left)
            num_left -= len(positions)
            if not len(segment):
                line.segments.popleft()
            taken.append((segment.request, positions))
            counts = self._requests[segment.request]
            counts[length] -= len(positions)
            if not counts[length]:
                del counts[length]
                if not counts:
                    del self._requests[segment.request]
        self._leave(length, line, num_sequences)
        return taken

    def _leave(self, length: int, line: Line, num_sequences: int) -> None:
        self._num_waiting -= num_sequences
        line.num_waiting -= num_sequences
        if not line.num_waiting:
            del self._lines[length], self._lengths[bisect_left(self._lengths, length)]


class IdleForecast:
    """A forecast of when the runner will be out of work.

    A wrong forecast may cost time, but never correctness.
    """

    def __init__(self) -> None:
        # Sums over the last batches. The pace is the ratio of the sums, not the mean of ratios, because a
        # tiny batch takes long for its cost.
        self._cost = 0.0
        self._seconds = 0.0
        self._cost_ahead = 0.0
        self._free_at = -math.inf

    @property
    def free_at(self) -> float:
        """Return the time at which the runner will have encoded all its work; in the past if it is idle."""
        return self._free_at

    def cost_within(self, seconds: float) -> float:
        """Estimate the cost of the batches that the runner completes in `seconds`; infinite before the first batch."""
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
        """Record that the runner is idle: batches that failed or were lost no longer count as work ahead."""
        self._cost_ahead = 0.0
        self._free_at = min(self._free_at, now)

    def _seconds_of(self, cost: float) -> float:
        return cost * self._seconds / self._cost if self._cost else 0.0


class SequencePool:
    """Holds sequences until they are taken in batches or removed with their request.

    `budget` returns the largest cost of a batch and is called for every batch. `num_started` batches are with
    the device at a time, of which it computes `num_streams` side by side. `num_tokenizing` requests will soon
    add their sequences. If `begins_short`, bulk begins with the shortest of the oldest request. `hold_end` is
    the time at which sequences that are held back will be sent; None if none are. All times are on one monotonic clock.
    """

    def __init__(self, limits: BatchLimits, cost: BatchCost | None = None) -> None:
        self._limits = limits
        self.cost = cost or BatchCost()
        self.budget: BudgetSource = lambda max_length: limits.max_batch_tokens
        self.num_started = 1
        self.num_streams = 1
        self.num_tokenizing = 0
        self.begins_short = False
        self.interactive_at = -math.inf  # the time at which the last interactive request arrived
        self.hold_end: float | None = None
        self._interactive = WaitingSequences()
        self._bulk = WaitingSequences()
        self._num_interactive_in_row = 0
        self._bulk_cost = 0.0  # of all waiting bulk sequences
        self._saved_padding = float(limits.max_saved_tokens)
        self._pace = IdleForecast()
        self._held_since: float | None = None

    def __len__(self) -> int:
        return len(self._interactive) + len(self._bulk)

    def begin(self, cost: BatchCost) -> list[tuple[int, NDArray[np.int32]]]:
        """Change the cost model and forget the measured pace.

        Return the sequences that waited, as requests with positions. They have to be added again, because
        their lengths and costs were those of the old cost model.
        """
        waiting = self.drain()
        self.cost = cost
        self._pace = IdleForecast()
        return waiting

    def can_fill_batch(self, max_bulk_cost: float = math.inf) -> bool:
        """Return True if the waiting bulk costs enough for a full batch, ignoring differences in length."""
        if not self._bulk:
            return False
        return self._bulk_cost >= self._bulk_budget(self._bulk.longest_of_oldest(), max_bulk_cost)

    def cost_of(self, batch: Sequences) -> float:
        """Return the cost of a batch that was taken from this pool."""
        return self.cost.of_batch(len(batch), batch.max_length, batch.cost_alone)

    def add(
        self,
        request: int,
        num_tokens: ArrayLike,
        positions: NDArray[np.int32] | None = None,
        *,
        is_interactive: bool = False,
    ) -> None:
        """Add sequences [n] of a request that is younger than all others.

        `num_tokens` has the length of each. Positions are 0, 1, 2, … unless they are given.
        """
        # The length at which each sequence is computed alone; each distinct number is looked up once.
        different, places = np.unique(np.asarray(num_tokens, dtype=np.int64), return_inverse=True)
        lengths = np.array([self.cost.find_length(number) for number in different.tolist()], np.int64)[places]
        if not len(lengths):
            return
        if positions is None:
            positions = np.arange(len(lengths), dtype=np.int32)
        if is_interactive:
            self._interactive.add(request, positions, lengths)
        else:
            self._bulk.add(request, positions, lengths)
            self._bulk_cost += float(self.cost.of_sequences(lengths).sum())

    def remove(self, request: int) -> None:
        """Remove the waiting sequences of a request, if there are any."""
        self._interactive.remove(request)
        for length, count in self._bulk.remove(request).items():
            self._bulk_cost -= count * self.cost.of_sequence(length)

    def drain(self) -> list[tuple[int, NDArray[np.int32]]]:
        """Remove all sequences so that they can be added again.

        Return requests with the positions that waited.
        """
        drained = [*self._interactive.drain(), *self._bulk.drain()]
        self._bulk_cost = 0.0
        return drained

    def take(self, now: float, *, is_runner_idle: bool, only_urgent: bool = False) -> Sequences:
        """Remove and return the batch to send now; empty if nothing waits, or until `hold_end`.

        With `only_urgent`, the batch begins with an interactive request, or is empty.
        """
        if only_urgent:
            return self._sent(self.take_batch(only_urgent=True), now)
        if is_runner_idle:
            self._pace.note_idle(now)
        is_interrupted = now - self.interactive_at < INTERACTIVE_SECONDS
        short_seconds = SHORT_BULK_SECONDS / self.num_started
        max_bulk_cost = self._pace.cost_within(short_seconds) if is_interrupted else math.inf
        if self._interactive or self.can_fill_batch(max_bulk_cost) or not self._hold(now):
            return self._sent(self.take_batch(min(max_bulk_cost, self._share_of_last())), now)
        return OpenBatch(self._limits, self.cost, 0.0).close()

    def note_encoded(self, batch: Sequences, seconds: float, now: float) -> None:
        """Update the measured pace from a batch that was encoded."""
        self._pace.note_encoded(self.cost_of(batch), seconds, now)

    def _share_of_last(self) -> float:
        """Return the largest cost of one of the last batches, so that all streams share the remaining bulk.

        Infinite while the remaining bulk fills a batch for each stream.
        """
        if self.num_streams == 1 or self.num_tokenizing:
            return math.inf
        budget = float(self.budget(self._bulk.longest_of_oldest())) if self._bulk else 0.0
        if self._bulk_cost >= self.num_streams * budget:
            return math.inf
        return max(self._bulk_cost / self.num_streams, SMALLEST_LAST_SHARE * budget)

    def _hold(self, now: float) -> bool:
        """Return True if sequences that do not fill a batch are still held back. Set `hold_end`."""
        if not len(self):
            self._held_since = self.hold_end = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        end = find_hold_end(self._pace.free_at, self._held_since, is_tokenizing=self.num_tokenizing > 0)
        self.hold_end = end if now < end else None
        return now < end

    def _sent(self, batch: Sequences, now: float) -> Sequences:
        if len(batch):
            self._held_since = self.hold_end = None
            self._pace.note_sent(self.cost_of(batch), now)
        return batch

    def take_batch(self, max_bulk_cost: float = math.inf, *, only_urgent: bool = False) -> Sequences:
        """Remove and return the next batch; empty if nothing waits. Bulk costs at most `max_bulk_cost`.

        With `only_urgent`, the batch begins with an interactive request, or is empty.
        """
        batch = OpenBatch(self._limits, self.cost, self._saved_padding)
        may_be_urgent = only_urgent or not self._bulk or self._num_interactive_in_row < MAX_INTERACTIVE_IN_ROW
        if self._interactive and may_be_urgent:
            self._num_interactive_in_row += 1
            anchor_length = self._interactive.longest_of_oldest()
            urgent, top_up = self._limits.urgent_share, self._limits.top_up_share
            self._fill(batch, self._interactive, anchor_length, lambda length: urgent * self.budget(length))
            self._fill(batch, self._bulk, anchor_length, lambda length: top_up * self.budget(length))
        elif not only_urgent:
            self._num_interactive_in_row = 0
            if self._bulk:
                bulk = self._bulk
                anchor_length = bulk.shortest_of_oldest() if self.begins_short else bulk.longest_of_oldest()
                self._fill(
                    batch, self._bulk, anchor_length, lambda length: self._bulk_budget(length, max_bulk_cost)
                )
        self._saved_padding = batch.saved_padding
        return batch.close()

    def _fill(
        self, batch: OpenBatch, waiting: WaitingSequences, length: int, budget: Callable[[int], float]
    ) -> None:
        """Add the sequences nearest in length: shorter ones until one does not fit, then longer ones.

        Bulk that fills no tile waits for more of its length, unless it is what the batch begins with.
        """
        for lengths in waiting.lengths_around(length):
            for other in lengths:
                num_waiting = waiting.count(other)
                fitting = batch.count_fitting(other, num_waiting, budget(max(batch.max_length, other)))
                taken = fitting
                if waiting is self._bulk and (batch.num_sequences or fitting < num_waiting):
                    taken = self.cost.fill_tiles(other, fitting) or (0 if batch.num_sequences else fitting)
                if taken:
                    batch.append(waiting.take(other, taken), other)
                    if waiting is self._bulk:
                        self._bulk_cost -= taken * self.cost.of_sequence(other)
                if fitting < num_waiting:
                    break

    def _bulk_budget(self, length: int, max_bulk_cost: float) -> float:
        budget = self.budget(length)
        return min(budget, max(max_bulk_cost, self._limits.shortest_bulk_share * budget))


def find_hold_end(free_at: float, held_since: float, *, is_tokenizing: bool) -> float:
    """Return the time at which a batch is sent even if it is not full.

    `free_at` is the expected or past time at which the runner has no work left. Until shortly before it,
    waiting costs nothing. A little longer pays if texts are being tokenized, which are likely to fill the
    batch.
    """
    if is_tokenizing:
        return max(free_at, held_since) + TOKENIZING_SECONDS
    return free_at - LEAD_SECONDS
