"""WaitingSequences: sequences of several requests in order of length, and which request is the oldest.

Knows neither batches nor costs. All sequences of one length lie in one line, those of older requests in front.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, deque

from worker.batching.sequence import Sequence


class WaitingSequences:
    """Requests are added in order of age, and leave one sequence at a time or whole."""

    def __init__(self) -> None:
        # Of each request in order of arrival: length to the number of its sequences that wait.
        self._requests: OrderedDict[int, Counter[int]] = OrderedDict()
        self._lines: dict[int, deque[Sequence]] = {}
        self._lengths: list[int] = []  # the keys of _lines, sorted
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, request: int) -> bool:
        return request in self._requests

    def add(self, sequences: list[Sequence]) -> None:
        """Sequences of one request, which is younger than all others."""
        for sequence in sequences:
            line = self._lines.get(sequence.length)
            if line is None:
                line = self._lines[sequence.length] = deque()
                insort(self._lengths, sequence.length)
            line.append(sequence)
        self._requests[sequences[0].request] = Counter(sequence.length for sequence in sequences)
        self._num_waiting += len(sequences)

    def remove(self, request: int) -> list[Sequence]:
        """Removes and returns what still waits of a request; nothing if it is not here."""
        removed: list[Sequence] = []
        for length in self._requests.pop(request, ()):
            line = self._lines.pop(length)
            removed += [sequence for sequence in line if sequence.request == request]
            self._set_line(length, deque(sequence for sequence in line if sequence.request != request))
        self._num_waiting -= len(removed)
        return removed

    def drain(self) -> list[Sequence]:
        """Removes and returns all."""
        drained = [sequence for line in self._lines.values() for sequence in line]
        self._requests.clear()
        self._lines.clear()
        self._lengths.clear()
        self._num_waiting = 0
        return drained

    def longest_of_oldest(self) -> int:
        """The longest length that waits of the oldest request. The first of that line is the oldest request's."""
        return max(next(iter(self._requests.values())))

    def lengths_around(self, length: int) -> tuple[list[int], list[int]]:
        """The lengths up to this one and the longer ones, both nearest first."""
        split = bisect_right(self._lengths, length)
        return self._lengths[:split][::-1], self._lengths[split:]

    def count(self, length: int) -> int:
        return len(self._lines[length])

    def take(self, length: int, num_sequences: int) -> list[Sequence]:
        """The oldest sequences of this length, which leave."""
        line = self._lines.pop(length)
        taken = [line.popleft() for _ in range(num_sequences)]
        self._set_line(length, line)
        self._num_waiting -= num_sequences
        for request, count in Counter([sequence.request for sequence in taken]).items():
            lengths = self._requests[request]
            lengths[length] -= count
            if not lengths[length]:
                del lengths[length]
                if not lengths:
                    del self._requests[request]
        return taken

    def _set_line(self, length: int, line: deque[Sequence]) -> None:
        """Puts back a line that was taken out, unless nobody is left in it."""
        if line:
            self._lines[length] = line
        else:
            del self._lengths[bisect_left(self._lengths, length)]
