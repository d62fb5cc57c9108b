"""RequestQueue collects the sequences of all requests into batches, and returns results to the requests.

It is thread-safe: callers add tickets and wait for them, while the executor's thread takes batches and
delivers their results. It knows nothing about processes, texts or specs.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.errors import ChunkError
from vectormill.jobs.item import ITEM_ERROR_CODES, OUT_OF_MEMORY, ItemFailure
from vectormill.ragged import Ragged
from worker.batching.batch import OUTPUTS, Batch, OwnedBatch, Sequences
from worker.batching.cost import BatchCost
from worker.batching.pool import BatchLimits, BudgetSource, SequencePool
from worker.engine.request import CANCEL_POLL_SECONDS, EncodingCancelled, EngineStopped, RunnerDied
from worker.tokens.tokenized import TokenizedTexts

# The number of query messages admitted alongside interactive chunks. One message may hold many texts.
QUERY_PLACES: Final = 3
# How long no text is tried that is as long as one that exhausted all devices; doubled each time, up to the longest.
FIRST_LIMIT_SECONDS: Final = 300.0
LONGEST_LIMIT_SECONDS: Final = 3600.0


class Admission:
    """Admission control: admits a limited number of requests, up to a sum of `max_tokens`. Thread-safe.

    The last one admitted may exceed `max_tokens`, so that a request of any size can enter. Other requests
    wait before their texts are tokenized.
    """

    def __init__(self, num_requests: int, max_tokens: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._max_tokens = max_tokens
        self._changed = threading.Condition()
        self._num_tokens = 0
        self.num_free = num_requests

    @contextmanager
    def hold(
        self, num_tokens: int, cancelled: threading.Event, is_running: Callable[[], bool]
    ) -> Iterator[None]:
        """Wait until the request is admitted, and count it while the block runs.

        Raises EncodingCancelled or EngineStopped if either happens during the wait.
        """
        with self._changed:
            while not self._changed.wait_for(
                lambda: self.num_free > 0 and self._num_tokens < self._max_tokens(), CANCEL_POLL_SECONDS
            ):
                if cancelled.is_set():
                    raise EncodingCancelled
                if not is_running():
                    raise EngineStopped
            self.num_free -= 1
            self._num_tokens += num_tokens
        try:
            yield
        finally:
            with self._changed:
                self.num_free += 1
                self._num_tokens -= num_tokens
                self._changed.notify_all()


class Ticket:
    """One request while it is encoded: the sequences to encode now, their results and the request's timings.

    The executor's thread writes to it from `add` until `done` is set, otherwise only the request's own thread
    does. `dimension` is that of the vectors; None if the model returns bytes or scores instead, which are kept
    as they arrive, equally long or not, and so are the rows of a request for several outputs. The results do not
    decide this, or a row that happens to be as long as a vector would be taken for one.
    """

    def __init__(self, dimension: int | None, *, is_interactive: bool) -> None:
        self.is_interactive = is_interactive
        self.number = -1
        self.done = threading.Event()
        self.error: ChunkError | None = None
        self.tokenize_seconds = self.wait_seconds = self.collate_seconds = self.run_seconds = 0.0
        self.num_padding_tokens = 0
        self.num_reused = 0
        self._dimension = dimension

    def lay(self, texts: TokenizedTexts, constants: Mapping[str, int]) -> None:
        """Set the sequences to encode next. Those without tokens are skipped."""
        self.texts = texts
        self.constants = constants
        self.positions = np.flatnonzero(
            texts.lengths
        )  # for each sequence of this ticket, the index of its text
        self.lengths = texts.lengths[self.positions]
        self.num_waiting = len(self.positions)
        self.failures: dict[int, ItemFailure] = dict(texts.failures)
        # The vectors [texts, dimension], with zeros for texts without a result.
        self.vectors: NDArray[np.float32] | None = None
        if self._dimension is not None and not constants.get(OUTPUTS):
            self.vectors = np.zeros((len(texts), self._dimension), dtype=np.float32)
        self._parts: list[tuple[NDArray[np.int64], Ragged]] = []
        self.done.clear()

    def take_over(self, places: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Fill in vectors [n, dim] that are already known, so that those texts are not encoded.

        Call before `add`.
        """
        if not len(places):
            return
        assert self.vectors is not None
        self.vectors[self.positions[places]] = vectors
        self.positions = np.delete(self.positions, places)
        self.lengths = np.delete(self.lengths, places)
        self.num_waiting = len(self.positions)
        self.num_reused += len(places)

    def gather(self, places: NDArray[np.int32]) -> dict[str, Ragged]:
        """Return the model inputs of these sequences of the ticket."""
        rows = self.positions[places]
        return {name: values.take(rows) for name, values in self.texts.inputs.items()}

    def put(self, places: NDArray[np.int32], results: Ragged) -> None:
        """Copy the results of these sequences into the ticket."""
        rows = self.positions[places]
        if self.vectors is not None:
            # Rows of bytes where another request of the batch asked for more than a vector.
            self.vectors[rows] = results.matrix.view(np.float32)
        else:
            values = results.covered.copy()
            self._parts.append((rows, Ragged(values, results.offsets - results.offsets[0])))

    def join(self) -> Ragged:
        """Return the results of all texts, in order.

        A missing row is zeros, or empty if results are not vectors.
        """
        if self.vectors is not None:
            return Ragged.from_matrix(self.vectors)
        lengths = np.zeros(len(self.texts), dtype=np.int64)
        if not self._parts:
            return Ragged.from_lengths(np.zeros(0, np.uint8), lengths)
        rows = np.concatenate([rows for rows, _ in self._parts])
        joined = Ragged.join([part for _, part in self._parts])
        lengths[rows] = joined.lengths
        return Ragged.from_lengths(joined.take(np.argsort(rows, kind="stable")).values, lengths)


class LengthLimit:
    """The longest text that is tried: what the plan has room for, or less after a text exhausted all devices alone.

    Each failure that ends a process loads the model again. Others may have taken the memory, so the lower limit ends
    after a while, and is forgotten once a longer text was encoded. While it holds, each further failure halves it, but
    not below what was encoded: texts that are shorter one after another are a few loads.
    """

    def __init__(self, planned_tokens: int) -> None:
        self._planned = planned_tokens or sys.maxsize
        self._found = self._planned
        self._until, self._seconds = -math.inf, 0.0
        self._encoded = 0  # the longest text that was

    def is_lowered(self, now: float) -> bool:
        return now < self._until

    def find(self, now: float) -> int:
        return self._found if self.is_lowered(now) else self._planned

    def lower(self, length: int, now: float) -> None:
        """Refuse texts of this length or longer for a while, since one of them has exhausted all devices."""
        self._encoded = self._encoded if self._encoded < length else 0
        if self.is_lowered(now):
            self._found = min(length - 1, max(self._found // 2, self._encoded))
        else:
            self._seconds = min(max(2 * self._seconds, FIRST_LIMIT_SECONDS), LONGEST_LIMIT_SECONDS)
            self._found = length - 1
        self._until = now + self._seconds

    def note_encoded(self, length: int) -> None:
        self._encoded = max(self._encoded, length)
        if length > self._found:
            self._until, self._seconds = -math.inf, 0.0

    def refuse(self, length: int, now: float) -> ItemFailure:
        """Return the failure of a text of this length, which is too long."""
        reason = (
            f"and this worker tries none of more than {self._found:,} for a while, since its devices ran out of memory "
            "with one alone. Other programs may use it: repeat the job's failed items when they have ended."
            if self.is_lowered(now)
            else f"but the plan of this worker has room for texts of at most {self._planned:,}. `vectormill plan` says "
            "what would hold longer ones."
        )
        return ItemFailure(OUT_OF_MEMORY, f"The text has {length:,} tokens, {reason}")


@dataclass(slots=True)
class BatchCounts:
    """Counts of batches, sequences, tokens and seconds since the start.

    The device had batches of this worker for `busy_seconds`, and computed them for `run_seconds`: both are the same
    unless workers share it.
    """

    num_batches: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    collate_seconds: float = 0.0
    busy_seconds: float = 0.0
    run_seconds: float = 0.0


class RequestQueue:
    """The queue of requests before the device.

    `next_work` may hold a batch back until more sequences fill it; `ask_again_at` returns the
    time.monotonic() at which the batch will be sent, full or not. `budget` returns the largest cost of a
    batch; it is called under the lock for every batch, so it must return at once. A sequence of more than
    `longest_text_tokens` fails before it is encoded; 0 stands for no limit.
    """

    def __init__(
        self,
        limits: BatchLimits,
        budget: BudgetSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        longest_text_tokens: int = 0,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pool = SequencePool(limits)
        self._pool.budget = budget or self._pool.budget
        self._longest = LengthLimit(longest_text_tokens)
        self._tickets: dict[int, Ticket] = {}
        self._next_number = 0
        self._closed_because: str | None = None
        self.tally = BatchCounts()

    def adopt(self, cost: BatchCost, num_started: int, num_streams: int = 1) -> None:
        """Prepare what waits for the cost model of a loaded encoder.

        `num_started` batches are with the device at a time, of which it computes `num_streams` side by side.
        """
        with self._lock:
            self._pool.num_started, self._pool.num_streams = num_started, num_streams
            if cost != self._pool.cost:
                self._put_back(self._pool.begin(cost))

    @contextmanager
    def hold_partial_batches(self) -> Iterator[None]:
        """While the block runs, let partial batches wait for more sequences, which it tokenizes."""
        with self._lock:
            self._pool.num_tokenizing += 1
        try:
            yield
        finally:
            with self._lock:
                self._pool.num_tokenizing -= 1

    def add(self, ticket: Ticket) -> None:
        """Queue the ticket's sequences. Raise EngineStopped once the queue is closed."""
        with self._lock:
            if self._closed_because is not None:
                raise EngineStopped(f"The engine is not running: {self._closed_because}.")
            ticket.number = self._next_number
            self._next_number += 1
            if ticket.num_waiting == 0:
                ticket.done.set()
                return
            self._tickets[ticket.number] = ticket
            if ticket.is_interactive:
                self._pool.interactive_at = self._clock()
            self._admit(ticket, np.arange(len(ticket.lengths), dtype=np.int32))

    def _admit(self, ticket: Ticket, places: NDArray[np.int32]) -> None:
        """Add these sequences of a ticket to the pool, and fail those that are too long."""
        now, lengths = self._clock(), ticket.lengths[places]
        is_long = lengths > self._longest.find(now)
        self._pool.add(
            ticket.number, lengths[~is_long], places[~is_long], is_interactive=ticket.is_interactive
        )
        too_long = zip(ticket.positions[places[is_long]].tolist(), lengths[is_long].tolist(), strict=True)
        self._fail(ticket, {text: self._longest.refuse(length, now) for text, length in too_long})

    def refuse_longer(self, work: OwnedBatch) -> None:
        """Fail what waits and is as long as the only sequence of this batch, which exhausted all devices alone."""
        with self._lock:
            self._longest.lower(work.batch.max_length, self._clock())
            self._put_back(self._pool.drain())

    def withdraw(self, ticket: Ticket) -> None:
        """Forget a ticket that nobody waits for any more. Its outstanding results will be dropped."""
        with self._lock:
            self._tickets.pop(ticket.number, None)
            self._pool.remove(ticket.number)

    def next_work(self, *, is_runner_idle: bool, only_urgent: bool = False) -> OwnedBatch | None:
        """Return the next batch, led by an interactive request if there is one.

        With `only_urgent`, return no other batch.
        """
        with self._lock:
            now = self._clock()
            # As longer ones may fail, what is known to fit is learned first.
            self._pool.begins_short = self._longest.is_lowered(now)
            sequences = self._pool.take(now, is_runner_idle=is_runner_idle, only_urgent=only_urgent)
            return self._make_work(sequences) if len(sequences) else None

    def ask_again_at(self) -> float | None:
        return self._pool.hold_end

    def _make_work(self, sequences: Sequences) -> OwnedBatch:
        sequences = sequences.sorted_by_request()  # so that each request's rows can be copied in one step
        runs = [(self._tickets[request], rows) for request, rows in sequences.by_request()]
        gathered = [ticket.gather(sequences.positions[rows]) for ticket, rows in runs]
        num_rows = [rows.stop - rows.start for _, rows in runs]
        none = [Ragged.from_lengths(np.zeros(0, np.int32), np.zeros(number, np.int64)) for number in num_rows]
        inputs = {
            name: Ragged.join([each.get(name, no) for each, no in zip(gathered, none, strict=True)])
            for name in dict.fromkeys(name for each in gathered for name in each)
        }
        for name in {name for ticket, _ in runs for name, value in ticket.constants.items() if value}:
            values = np.array([ticket.constants.get(name, 0) for ticket, _ in runs], np.int32)
            inputs[name] = Ragged.from_scalars(np.repeat(values, num_rows))
        return OwnedBatch(sequences, Batch(inputs), any(ticket.is_interactive for ticket, _ in runs))

    def take_back(self, works: Iterable[OwnedBatch]) -> list[OwnedBatch]:
        """Put the sequences of batches that were not encoded back into the pool, so that others are built of them.

        Return those that keep their sequences, as one of these may be to blame for a failure.
        """
        kept: list[OwnedBatch] = []
        with self._lock:
            parts = self._pool.drain()
            for work in works:
                # The limits for batches or texts may have become lower since the batch was built.
                is_short = work.batch.max_length <= self._longest.find(self._clock())
                is_small = len(work.batch) == 1 or (
                    self._pool.cost_of(work.sequences) <= self._pool.budget(work.length)
                )
                if work.is_doubtful and is_short and is_small:
                    kept.append(work)
                else:
                    sequences = work.sequences
                    parts += [
                        (request, sequences.positions[rows]) for request, rows in sequences.by_request()
                    ]
            self._put_back(parts)
        return kept

    def _put_back(self, parts: list[tuple[int, NDArray[np.int32]]]) -> None:
        """Add these positions of requests to the empty pool again, oldest request first."""
        positions: dict[int, list[NDArray[np.int32]]] = {}
        for request, some in parts:
            positions.setdefault(request, []).append(some)
        for request in sorted(positions.keys() & self._tickets.keys()):
            self._admit(self._tickets[request], np.sort(np.concatenate(positions[request])))

    def deliver(
        self,
        work: OwnedBatch,
        results: Ragged,
        seconds: float,
        collate_seconds: float = 0.0,
        share: float = 1.0,
    ) -> None:
        """Copy the results of a batch to their tickets. The memory of `results` may be reused afterwards."""
        num_tokens, lengths = work.batch.num_tokens, work.batch.lengths
        runs = list(work.sequences.by_request())
        # This runs without the lock: if a ticket is withdrawn in the meantime, nobody reads it.
        for request, rows in runs:
            ticket = self._tickets.get(request)
            if ticket is not None:
                ticket.put(work.sequences.positions[rows], results.part(rows.start, rows.stop))
        with self._lock:
            pads = self._pool.cost.pads
            self._pool.note_encoded(work.sequences, seconds, self._clock())
            self._longest.note_encoded(work.batch.max_length)
            self.tally.num_batches += 1
            self.tally.num_sequences += len(work.sequences)
            self.tally.num_tokens += num_tokens
            self.tally.num_computed_tokens += work.length * len(work.sequences) if pads else num_tokens
            self.tally.busy_seconds += seconds
            self.tally.run_seconds += seconds * share
            self.tally.collate_seconds += collate_seconds
            for request, rows in runs:
                ticket = self._tickets.get(request)
                if ticket is None:  # the ticket was withdrawn in the meantime
                    continue
                num_own, own_tokens = rows.stop - rows.start, int(lengths[rows].sum())
                if pads:
                    ticket.num_padding_tokens += work.length * num_own - own_tokens
                ticket.run_seconds += seconds * own_tokens / num_tokens
                ticket.collate_seconds += collate_seconds * own_tokens / num_tokens
                self._count_down(ticket, num_own)

    def fail_work(self, work: OwnedBatch, code: str, reason: str) -> None:
        """Fail the only sequence of this batch, because the model raised an error on it.

        `code` is an item error's code.
        """
        with self._lock:
            for request, rows in work.sequences.by_request():
                ticket = self._tickets.get(request)
                if ticket is not None:
                    failure = ItemFailure(code, f"{ITEM_ERROR_CODES[code]} ({reason})")
                    texts = ticket.positions[work.sequences.positions[rows]].tolist()
                    self._fail(ticket, dict.fromkeys(texts, failure))

    def _fail(self, ticket: Ticket, failures: Mapping[int, ItemFailure]) -> None:
        """Record why texts of a ticket have failed."""
        ticket.failures.update(failures)
        self._count_down(ticket, len(failures))

    def lose_work(self, work: OwnedBatch, reason: str) -> None:
        """Fail every request with a sequence in this batch, as suspect, because the process died with it."""
        with self._lock:
            for number, _ in work.sequences.by_request():
                message = f"The model process died while encoding texts of this request: {reason}."
                self._end(number, RunnerDied(message, is_suspect=True))

    def close(self, reason: str) -> None:
        """Fail all waiting requests, because nothing will be encoded any more."""
        with self._lock:
            self._closed_because = reason.rstrip(".") or "it was stopped"
            for number in list(self._tickets):
                self._end(number, EngineStopped(f"The engine is not running: {self._closed_because}."))

    def _count_down(self, ticket: Ticket, num_sequences: int) -> None:
        ticket.num_waiting -= num_sequences
        if ticket.num_waiting == 0:
            self._end(ticket.number, None)

    def _end(self, number: int, error: ChunkError | None) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._pool.remove(number)
            ticket.error = error
            ticket.done.set()
