"""Switchboard: takes the requests' sequences apart into batches and brings the results back. Threads meet here.

Callers add tickets and wait for them; the executor's thread takes work and delivers outcomes. Knows nothing of
processes, texts or specs.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.errors import ChunkError
from vectormill.jobs.item import ITEM_ERROR_CODES, ItemFailure
from vectormill.ragged import Ragged
from worker.batching.batch import PROMPT_LENGTH, Batch
from worker.batching.cost import BatchCost
from worker.batching.feed import Feed
from worker.batching.limits import BatchLimits, BudgetSource
from worker.batching.pool import SequencePool
from worker.batching.sequences import Sequences
from worker.engine.request import EngineStopped, RunnerDied
from worker.engine.result_rows import ResultRows
from worker.engine.work import OwnedBatch
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts


@dataclass(slots=True, eq=False)
class Ticket:
    """One request while it is being encoded. Written by the executor's thread until `done` is set."""

    texts: TokenizedTexts
    prompt_length: int
    is_interactive: bool
    results: ResultRows
    positions: NDArray[
        np.int64
    ]  # the texts that are to be computed; a sequence's position is an index of this
    lengths: NDArray[np.int64]  # of these
    num_waiting: int
    number: int = -1
    failures: dict[int, ItemFailure] = field(default_factory=dict)
    num_padding_tokens: int = 0
    tokenize_seconds: float = 0.0
    run_seconds: float = 0.0
    collate_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_reused: int = 0
    error: ChunkError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def for_texts(
        cls, texts: TokenizedTexts, dimension: int | None, prompt_length: int, is_interactive: bool
    ) -> "Ticket":
        """Make the ticket of all texts that have tokens. Without a `dimension` rows have any length."""
        lengths = texts.lengths
        positions = np.flatnonzero(lengths)
        results = ResultRows(len(texts), dimension)
        return cls(
            texts, prompt_length, is_interactive, results, positions, lengths[positions], len(positions)
        )

    def count_in(self, earlier: "Ticket") -> None:
        """Add the times and counts of an earlier ticket of the same request."""
        self.num_padding_tokens += earlier.num_padding_tokens
        self.tokenize_seconds += earlier.tokenize_seconds
        self.run_seconds += earlier.run_seconds
        self.collate_seconds += earlier.collate_seconds
        self.wait_seconds += earlier.wait_seconds
        self.num_reused += earlier.num_reused

    def take_over(self, places: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Fill in vectors [n, dim] that are already known, so that those texts are not encoded. Call before `add`."""
        if not len(places):
            return
        self.results.put_vectors(self.positions[places], vectors)
        self.positions = np.delete(self.positions, places)
        self.lengths = np.delete(self.lengths, places)
        self.num_waiting = len(self.positions)
        self.num_reused += len(places)

    def gather(self, places: NDArray[np.int32]) -> dict[str, Ragged]:
        """Return the inputs of these sequences."""
        rows = self.positions[places]
        return {name: values.take(rows) for name, values in self.texts.inputs.items()}


@dataclass(slots=True)
class Tally:
    """Counts of what has been run since the start."""

    num_batches: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    collate_seconds: float = 0.0
    run_seconds: float = 0.0


class Switchboard:
    """Lays the sequences of all tickets into batches, and their results where they belong.

    Callers add tickets from any thread. `next_work` may hold a batch back, hoping for more to fill it;
    `ask_again_at`, a moment of time.monotonic, is when it will not any more.
    """

    def __init__(self, limits: BatchLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pool = SequencePool(limits)
        self._feed = Feed(self._pool)
        self._tickets: dict[int, Ticket] = {}
        self._next_number = 0
        self._closed_because: str | None = None
        self.tally = Tally()

    def adopt(self, cost: BatchCost, num_started: int, num_streams: int = 1) -> bool:
        """Rebuild the waiting batches for the cost model of a loaded encoder. Return True if there is a new cost model.

        `num_started` batches are with the device at a time, `num_streams` of them side by side.
        """
        with self._lock:
            self._feed.num_started, self._feed.num_streams = num_started, num_streams
            if cost == self._pool.cost:
                return False
            waiting = self._pool.drain()
            self._pool.cost = cost
            self._feed.forget_pace()
            self._put_back(waiting)
            return True

    def set_budget(self, budget: BudgetSource) -> None:
        """Set the source of budgets. It is asked for every batch under the lock, so it must answer at once."""
        with self._lock:
            self._pool.budget = budget

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Announce sequences that are being tokenized in the block: a batch that is not full may wait for them."""
        with self._lock:
            self._feed.num_tokenizing += 1
        try:
            yield
        finally:
            with self._lock:
                self._feed.num_tokenizing -= 1

    def add(self, ticket: Ticket) -> None:
        """Queue the ticket's sequences. Raises EngineStopped once the switchboard is closed."""
        with self._lock:
            if self._closed_because is not None:
                raise EngineStopped(f"The engine does not run: {self._closed_because}.")
            ticket.number = self._next_number
            self._next_number += 1
            if ticket.num_waiting == 0:
                ticket.done.set()
                return
            self._tickets[ticket.number] = ticket
            if ticket.is_interactive:
                self._feed.note_interactive(self._clock())
            self._pool.add(ticket.number, ticket.lengths, is_interactive=ticket.is_interactive)

    def withdraw(self, ticket: Ticket) -> None:
        """Forget a ticket nobody waits for any more. Results that are on their way are dropped."""
        with self._lock:
            self._tickets.pop(ticket.number, None)
            self._pool.remove(ticket.number)

    def next_work(self, *, is_runner_idle: bool, only_urgent: bool = False) -> OwnedBatch | None:
        """Return the next batch, led by an interactive request if there is one, or only such a one."""
        with self._lock:
            sequences = self._feed.take(self._clock(), is_runner_idle=is_runner_idle, only_urgent=only_urgent)
            return self._make_work(sequences)

    def ask_again_at(self) -> float | None:
        return self._feed.hold_end

    def _make_work(self, sequences: Sequences) -> OwnedBatch | None:
        if not len(sequences):
            return None
        sequences = sequences.sorted_by_request()  # so that each request's rows can be copied at once
        runs = [(self._tickets[request], rows) for request, rows in sequences.by_request()]
        gathered = [ticket.gather(sequences.positions[rows]) for ticket, rows in runs]
        inputs = {name: Ragged.join([each[name] for each in gathered]) for name in gathered[0]}
        if any(ticket.prompt_length for ticket, _ in runs):
            prompts = [
                np.minimum(ticket.prompt_length, each[INPUT_IDS].lengths)
                for (ticket, _), each in zip(runs, gathered, strict=True)
            ]
            inputs[PROMPT_LENGTH] = Ragged.from_scalars(np.concatenate(prompts).astype(np.int32))
        return OwnedBatch(sequences, Batch(inputs), any(ticket.is_interactive for ticket, _ in runs))

    def take_back(self, works: Iterable[OwnedBatch]) -> None:
        """Return the sequences of batches that were not encoded to the pool."""
        with self._lock:
            taken = [
                (request, work.sequences.positions[rows])
                for work in works
                for request, rows in work.sequences.by_request()
            ]
            self._put_back([*self._pool.drain(), *taken])

    def _put_back(self, parts: list[tuple[int, NDArray[np.int32]]]) -> None:
        """Add positions of requests to the empty pool again, oldest request first."""
        positions: dict[int, list[NDArray[np.int32]]] = {}
        for request, some in parts:
            positions.setdefault(request, []).append(some)
        for request in sorted(positions.keys() & self._tickets.keys()):
            ticket = self._tickets[request]
            places = np.sort(np.concatenate(positions[request]))
            self._pool.add(request, ticket.lengths[places], places, is_interactive=ticket.is_interactive)

    def deliver(
        self, work: OwnedBatch, results: Ragged, seconds: float, collate_seconds: float = 0.0
    ) -> None:
        """Copy the results of a batch to their tickets. The memory of `results` may be reused afterwards."""
        num_tokens, lengths = work.batch.num_tokens, work.batch.lengths
        runs = list(work.sequences.by_request())
        # Without the lock: a ticket that is withdrawn meanwhile is read by nobody.
        for request, rows in runs:
            ticket = self._tickets.get(request)
            if ticket is not None:
                places = ticket.positions[work.sequences.positions[rows]]
                ticket.results.put(places, results.part(rows.start, rows.stop))
        with self._lock:
            pads = self._pool.cost.pads
            self._feed.note_encoded(work.sequences, seconds, self._clock())
            self.tally.num_batches += 1
            self.tally.num_sequences += len(work.sequences)
            self.tally.num_tokens += num_tokens
            self.tally.num_computed_tokens += work.length * len(work.sequences) if pads else num_tokens
            self.tally.run_seconds += seconds
            self.tally.collate_seconds += collate_seconds
            for request, rows in runs:
                ticket = self._tickets.get(request)
                if ticket is None:  # withdrawn meanwhile
                    continue
                num_own, own_tokens = rows.stop - rows.start, int(lengths[rows].sum())
                if pads:
                    ticket.num_padding_tokens += work.length * num_own - own_tokens
                ticket.run_seconds += seconds * own_tokens / num_tokens
                ticket.collate_seconds += collate_seconds * own_tokens / num_tokens
                self._count_down(ticket, num_own)

    def fail_work(self, work: OwnedBatch, code: str, reason: str) -> None:
        """Fail the one sequence of this work, on which the model raised. `code` is that of an item error."""
        with self._lock:
            for request, rows in work.sequences.by_request():
                ticket = self._tickets.get(request)
                if ticket is not None:
                    failure = ItemFailure(code, f"{ITEM_ERROR_CODES[code]} ({reason})")
                    texts = ticket.positions[work.sequences.positions[rows]].tolist()
                    ticket.failures.update(dict.fromkeys(texts, failure))
                    self._count_down(ticket, len(texts))

    def lose_work(self, work: OwnedBatch, reason: str) -> None:
        """End every request with a sequence in this batch, with which the model process died, as suspect."""
        with self._lock:
            for number, _ in work.sequences.by_request():
                message = f"The model process died while it encoded texts of this request: {reason}."
                self._end(number, RunnerDied(message, is_suspect=True))

    def close(self, reason: str) -> None:
        """End all waiting requests, because nothing will be encoded any more."""
        with self._lock:
            self._closed_because = reason.rstrip(".") or "it was stopped"
            for number in list(self._tickets):
                self._end(number, EngineStopped(f"The engine does not run: {self._closed_because}."))

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
