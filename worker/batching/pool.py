"""SequencePool: the waiting sequences of all requests for one model, and the next batch of them.

Knows nothing of devices, tokens or threads: whoever shares it holds a lock.

The next batch is built around an *anchor*, the longest waiting sequence of the oldest request (of the oldest
interactive request, if there is one). It is filled with the sequences nearest in length, of any request, first the
shorter ones, then the longer ones. So the oldest chunk is finished first, its successors are encoded while it is
written to the database, and a batch pads little, because it chooses among the sequences of all chunks in flight.

A batch costs its longest length times its number of sequences, as a kernel that pads computes it. Cost of building
it: one step per sequence taken and one per different length visited.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from worker.batching.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a batch may be, and how much of it may be padding.

    `max_batch_tokens` counts padding. A batch pads at most `max_padding_share` of its cost or `min_padding_tokens`,
    whichever is more: below that, one batch more would cost the device more than the padding does.
    """

    max_batch_tokens: int
    max_padding_share: float = 0.05
    min_padding_tokens: int = 64


class _Request:
    """One request's waiting sequences, to be asked for the longest of them."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._longest_first = sorted(sequences, key=lambda sequence: -sequence.num_tokens)
        self._next = 0
        self.waiting = set(sequences)

    def longest(self) -> Sequence:
        """The longest waiting sequence. Each one that was taken meanwhile is passed over only once."""
        while self._longest_first[self._next] not in self.waiting:
            self._next += 1
        return self._longest_first[self._next]


class SequencePool:
    """Holds sequences until they are taken in batches, or removed with their request."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        # In order of arrival. Interactive requests are kept apart, because they go first.
        self._interactive: OrderedDict[int, _Request] = OrderedDict()
        self._bulk: OrderedDict[int, _Request] = OrderedDict()
        # Length to the sequences of that length, oldest first; ordered dictionaries, so that any one can be removed
        # in a step. `_lengths` are the keys, sorted: as many as there are different lengths, not sequences.
        self._by_length: dict[int, OrderedDict[Sequence, None]] = {}
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._by_length.values())

    @property
    def has_interactive(self) -> bool:
        """The next batch is led by an interactive request."""
        return bool(self._interactive)

    def add(self, request: int, lengths: Iterable[int], *, is_interactive: bool = False) -> None:
        """Adds the sequences of a new request, one for each length; their positions are 0, 1, 2, …"""
        sequences = [Sequence(request, position, length) for position, length in enumerate(lengths)]
        if not sequences:
            return
        (self._interactive if is_interactive else self._bulk)[request] = _Request(sequences)
        for sequence in sequences:
            bucket = self._by_length.get(sequence.num_tokens)
            if bucket is None:
                bucket = self._by_length[sequence.num_tokens] = OrderedDict()
                insort(self._lengths, sequence.num_tokens)
            bucket[sequence] = None

    def remove(self, request: int) -> None:
        """Removes what still waits of a request; nothing if it is not in the pool."""
        found = self._interactive.get(request) or self._bulk.get(request)
        for sequence in list(found.waiting) if found else ():
            self._take(sequence)

    def take_batch(self) -> list[Sequence]:
        """The next batch, which leaves the pool; empty when nothing waits. Longest sequence first or last."""
        if not self._interactive and not self._bulk:
            return []
        oldest = next(iter((self._interactive or self._bulk).values()))
        draft = _Draft(self.limits, oldest.longest())
        self._take(draft.sequences[0])
        anchor_length = draft.max_length
        self._fill(draft, self._lengths[: bisect_right(self._lengths, anchor_length)][::-1])
        self._fill(draft, self._lengths[bisect_right(self._lengths, anchor_length) :])
        return draft.sequences

    def _fill(self, draft: "_Draft", lengths: list[int]) -> None:
        """Takes sequences of the given lengths, nearest first, until one does not fit."""
        for length in lengths:
            bucket = self._by_length[length]
            while bucket:
                if not draft.has_room_for(length):
                    return
                sequence = next(iter(bucket))
                self._take(sequence)
                draft.append(sequence)

    def _take(self, sequence: Sequence) -> None:
        bucket = self._by_length[sequence.num_tokens]
        del bucket[sequence]
        if not bucket:
            del self._by_length[sequence.num_tokens]
            del self._lengths[bisect_right(self._lengths, sequence.num_tokens) - 1]
        requests = self._interactive if sequence.request in self._interactive else self._bulk
        waiting = requests[sequence.request].waiting
        waiting.remove(sequence)
        if not waiting:
            del requests[sequence.request]


class _Draft:
    """A batch while it is being filled."""

    def __init__(self, limits: BatchLimits, anchor: Sequence) -> None:
        self._limits = limits
        self.sequences = [anchor]
        self.max_length = anchor.num_tokens
        self._num_tokens = anchor.num_tokens

    def has_room_for(self, length: int) -> bool:
        cost = max(self.max_length, length) * (len(self.sequences) + 1)
        padding = cost - self._num_tokens - length
        limits = self._limits
        return cost <= limits.max_batch_tokens and padding <= max(
            limits.min_padding_tokens, limits.max_padding_share * cost
        )

    def append(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.max_length = max(self.max_length, sequence.num_tokens)
        self._num_tokens += sequence.num_tokens
