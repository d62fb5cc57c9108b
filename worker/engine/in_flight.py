"""InFlight keeps the batches of one executor from the moment they are taken until their outcome is known.

It holds the batches that are with the runner, those that will be sent again, and those that failed and wait for
the result of known texts. It decides what the runner gets next, and which text is to blame when a batch fails or a
process is lost. It does not start, call or end any process.

The results of known texts are those of when the model was first loaded; encoding them again shows that the process
is sound. After a failed batch, nobody knows whether a text was to blame or the process is sick: after
running out of memory, openvino fails with every batch or confuses the shapes of one batch with those of
another, and oneDNN can create no kernel any more. So neither the failure nor any later result is trusted
before every stream has encoded the known texts again.

A failed batch is tried again in many parts, because a failure may end the process: of up to 65 texts, k bad ones
cost k + 1 loads of the model, and the others are encoded. Texts that need too much memory cost two loads for
each that fails alone. Few do: no longer one is tried then, and the next failure halves that limit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.jobs.item import ENCODING_FAILED, OUT_OF_MEMORY
from vectormill.ragged import Ragged
from worker.batching.batch import Batch, OwnedBatch
from worker.encoder.encoder import EncoderReport
from worker.engine.request_queue import RequestQueue
from worker.engine.tuner import Tuner
from worker.runner.memory import MemoryReport
from worker.runner.messages import (
    BATCHES_AHEAD,
    LONGEST_QUEUED_SECONDS,
    URGENT_BATCHES_AHEAD,
    Encode,
    Encoded,
    EncodeFailed,
    Started,
)
from worker.runner.runner import RunnerLost

# A sequence that failed alone is given up after so many failures, also of larger batches, if the process was sound
# after each. An error that goes away is not the text's fault.
FAILURES_OF_ONE: Final = 3
# As above, for replicas of which each failure ends all processes: these were sound when they were loaded, and have
# their whole memory again.
ENDS_BY_ONE: Final = 2
# A sequence is lost after it was so often alone in a sound process that was sick afterwards: the text may be
# the cause.
SICKENED_BY_ONE: Final = 2
# If this share of a device's memory was in use before its process was killed, some guard of memory is assumed
# to have killed it before the kernel had to.
NEARLY_ALL_MEMORY: Final = 0.95
# A process that can create no new kernel still has kernels for shapes that it has seen. So each batch of known texts
# has another shape, with one row more than the one before. With this many shapes, no library keeps them all.
MOST_ROWS: Final = 64
# The number of batches of known texts, beyond one for each stream, for a process that replaces a sick one.
NUM_MORE: Final = 4


@dataclass(frozen=True, slots=True)
class KnownTexts:
    """A batch of known texts, and a function that finds errors in their results.

    `find_flaw(results, expected)` compares rows of one text with the values that it had before. The task knows which
    differences matter.
    """

    batch: Batch
    find_flaw: Callable[[Ragged, NDArray[Any]], str]


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch that failed, and the item error to report if its only sequence is given up."""

    work: OwnedBatch
    code: str
    reason: str


@dataclass(slots=True)
class HealthCheck:
    """The check of one process by known texts, and the outcomes that are withheld until every stream has encoded them.

    `flaw` says what was wrong with a result. Once it is set, no result of this process is trusted. `has_turned`
    says that a result was another one, while a batch that failed alone says nothing about earlier results.
    """

    known: KnownTexts
    num_due: int = 0  # batches that are still to be sent
    numbers: dict[int, Batch] = field(default_factory=dict)  # the batches that are with the process
    flaw: str = ""
    has_turned: bool = False
    failed: list[FailedBatch] = field(default_factory=list)
    withheld: list[tuple[OwnedBatch, Encoded]] = field(default_factory=list)  # outcomes of a process in doubt
    _expected: list[NDArray[Any]] = field(default_factory=list)  # the first results, one for each known text
    _num_rows: int = 0

    @property
    def is_open(self) -> bool:
        """Return True until every stream has answered correctly.

        After a flaw, the check stays open until the process ends.
        """
        return bool(self.num_due or self.numbers or self.flaw)

    def begin(self, num_streams: int, *, is_in_doubt: bool, is_same: bool = False) -> None:
        """Start the check of a newly loaded process. Later results are compared with its first.

        A process that runs the same encoder as the one before it is compared with that one's: it may have read
        the weights of a damaged file. After a sick process more batches are sent, so that no text is blamed for a
        fault that occurs without it.
        """
        self._expected = self._expected if is_same else []
        self._num_rows, self.flaw, self.has_turned = len(self.known.batch) - 1, "", False
        self.numbers.clear()
        self.num_due = 1 + num_streams + NUM_MORE * is_in_doubt

    def doubt(self, num_streams: int) -> None:
        """Start a check after a failed batch. Known texts already on their way may have been encoded before it."""
        self.num_due = num_streams

    def next_batch(self, number: int) -> Batch:
        self.num_due -= 1
        num_texts = len(self.known.batch)
        self._num_rows = max(num_texts, self._num_rows % MOST_ROWS + 1)
        self.numbers[number] = batch = self.known.batch.take(np.arange(self._num_rows) % num_texts)
        return batch

    def compare(self, number: int, results: Ragged) -> None:
        """Compare the results of a batch of known texts with the first ones."""
        self.numbers.pop(number, None)
        num_texts = len(self.known.batch)
        if not self._expected:
            self._expected = [results.row(place).copy() for place in range(num_texts)]
        for place, expected in enumerate(self._expected):
            rows = results.take(np.arange(place, len(results), num_texts))
            if flaw := self.known.find_flaw(rows, expected):
                self.flaw, self.has_turned = self.flaw or flaw, True

    def end(self) -> None:
        """End the check without a result, because the process has ended."""
        self.num_due, self.flaw, self.has_turned = 0, "", False
        self.numbers.clear()


class InFlight:
    """The batches in flight and the decisions about their outcomes. Used by the executor's thread only.

    The model can encode the `known` texts; `dimension` is that of the model's vectors, if it
    returns vectors.
    """

    def __init__(self, queue: RequestQueue, tuner: Tuner, known: KnownTexts, dimension: int) -> None:
        self._queue = queue
        self._tuner = tuner
        self.check = HealthCheck(known)
        self._model_dimension = dimension
        self._dimension: int | None = None  # of the results, if they are vectors
        self.outstanding: dict[int, OwnedBatch] = {}  # batches that are with the runner, by number
        self.started: dict[int, float] = {}  # when each batch that is being encoded was started, by number
        # Batches to send again before anything new: suspects first, then parts and batches that are not to
        # blame. Urgent ones come first.
        self._suspects: list[OwnedBatch] = []
        self._returned: list[OwnedBatch] = []
        self._num_streams, self._num_computed, self._is_queued = 1, 1, False
        self._encoder: tuple[str, ...] = ()  # backend, precision and attention of the last process
        self._last_seconds = math.inf  # seconds of the last batch
        self._next_number = 0
        self.is_sickness = False  # whether the last runner was lost because it was sick
        self.heard_at = 0.0
        self.num_lost_in_row = 0  # runners, since a batch was encoded or a text given up for its content
        self.memory: MemoryReport | None = None  # the newest report

    def begin(self, report: EncoderReport, memory: MemoryReport | None) -> None:
        """Prepare for a runner that has loaded the model."""
        same = self._encoder == (encoder := (report.backend.value, report.precision.value, report.attention))
        self._encoder = encoder
        self._num_streams, self._num_computed = report.num_streams, report.num_computed
        self._is_queued, self.memory = report.is_queued, memory
        self._last_seconds = math.inf
        self._dimension = self._model_dimension if report.gives_vectors else None
        self.check.begin(self._num_streams, is_in_doubt=self.is_sickness, is_same=same)

    @property
    def is_drained(self) -> bool:
        """Return whether nothing depends on the process any more: no batch is with it, and no result is in doubt."""
        return not self.outstanding and not self.check.is_open

    def rebuild(self) -> None:
        """Give batches that are to be tried again back to the queue, since another process takes other batches."""
        self._returned = self._queue.take_back(self._returned)

    def prove(self) -> None:
        """Start a check of the runner although nothing has failed: it may have become faulty without an error."""
        self.check.doubt(self._num_streams)

    @property
    def has_room(self) -> bool:
        """Return True if the runner has room for a batch: it may have those that it computes and one more."""
        num_queued = self._is_queued and self._last_seconds < LONGEST_QUEUED_SECONDS
        return (
            not self.check.is_open and len(self.outstanding) < self._num_computed + num_queued + BATCHES_AHEAD
        )

    def next_message(self) -> Encode | None:
        """Return the next message for the runner, with known texts or a batch; None if the runner has enough.

        The batch counts as sent at once, so that it is not forgotten if the runner dies while it is sent.
        """
        if self.check.num_due:
            self._next_number += 1
            self.heard_at = time.monotonic()
            return Encode(self._next_number, self.check.next_batch(self._next_number), is_urgent=True)
        work = self.next_work()
        if work is None:
            return None
        if not self.outstanding:
            self.heard_at = time.monotonic()
        self._next_number += 1
        self.outstanding[self._next_number] = work
        return Encode(self._next_number, work.batch, work.is_urgent)

    def next_work(self) -> OwnedBatch | None:
        """Return the next batch that the runner has room for; None if it has enough.

        There is more room for urgent batches. A suspect is sent only when the runner has no other batch. Only
        this function orders batches by urgency. Everything after it keeps the order, except that a runner
        with one waiting batch encodes an urgent one first.
        """
        if self.check.is_open or any(work.is_suspect for work in self.outstanding.values()):
            return None
        if self._suspects:
            return None if self.outstanding else self._suspects.pop(0)
        num_urgent = sum(work.is_urgent for work in self.outstanding.values())
        if not self.has_room and num_urgent >= URGENT_BATCHES_AHEAD:
            return None
        if self._returned and (self.has_room or self._returned[0].is_urgent):
            return self._returned.pop(0)
        return self._queue.next_work(is_runner_idle=not self.outstanding, only_urgent=not self.has_room)

    def ask_again_at(self) -> float:
        """Return the time at which a held-back batch will be sent, full or not; infinite if there is none."""
        moment = self._queue.ask_again_at() if self.has_room else None
        return math.inf if moment is None else moment

    def find_deadline(self, seconds: float) -> float:
        """Return the time at which the oldest forward pass has taken too long; infinite if none runs."""
        if not self.outstanding and not self.check.numbers:
            return math.inf
        return min(self.started.values(), default=self.heard_at) + seconds

    def suspect_overdue(self, seconds: float) -> None:
        """Keep only overdue batches as started: the batches of other streams are not to blame."""
        begun_before = time.monotonic() - seconds
        self.started = {number: at for number, at in self.started.items() if at <= begun_before}

    def receive(self, message: object) -> None:
        """Process the runner's message about a batch.

        Outcomes are matched by number, since urgent batches overtake.
        """
        self.heard_at = time.monotonic()
        if isinstance(message, Encoded):
            self._last_seconds = message.seconds
            work = self.outstanding.get(message.number)
            has_vectors = (self.check.known.batch if work is None else work.batch).outputs is None
            if misfit := find_misfit(message.results, self._dimension if has_vectors else None):
                message = EncodeFailed(message.number, misfit)
        if isinstance(message, Started):
            self.started[message.number] = self.heard_at
        elif isinstance(message, Encoded | EncodeFailed) and message.number in self.check.numbers:
            self._receive_known(message)
        elif isinstance(message, Encoded):
            work = self._end(message.number)
            if self.check.is_open:
                self.check.withheld.append((work, message))
            else:
                self._deliver(work, message)
        elif isinstance(message, EncodeFailed):
            work = self._end(message.number)
            if message.is_out_of_memory:
                self._observe_out_of_memory(work, message.reason)
            code = OUT_OF_MEMORY if message.is_out_of_memory else ENCODING_FAILED
            self.check.failed.append(FailedBatch(work, code, message.reason))
            self.check.doubt(self._num_streams)

    def _observe_out_of_memory(self, work: OwnedBatch, reason: str) -> None:
        """Make batches smaller, unless one text failed again, from which nothing more is learned."""
        if len(work.sequences) > 1 or not work.num_failures:
            self._tuner.observe_out_of_memory(work, reason)

    def _receive_known(self, message: Encoded | EncodeFailed) -> None:
        self.started.pop(message.number, None)
        self._tuner.note(self.check.numbers[message.number])
        if isinstance(message, Encoded):
            self.check.compare(message.number, message.results)
        else:
            del self.check.numbers[message.number]
            self.check.flaw = self.check.flaw or message.reason
        if not self.check.is_open:
            self._settle()

    def _settle(self, *, is_ended: bool = False) -> None:
        """Deliver withheld results and judge failed batches, because the runner has proved sound.

        A batch is tried again in parts, and its only sequence until it has failed often enough. If a failure has ended
        the runner, which `is_ended` says, none is tried that would fail for the same lack of memory.
        """
        most_failures = ENDS_BY_ONE if is_ended else FAILURES_OF_ONE
        withheld, self.check.withheld = self.check.withheld, []
        failed, self.check.failed = self.check.failed, []
        for work, message in withheld:
            self._deliver(work, message)
        for each in failed:
            if len(each.work.sequences) == 1 and each.work.num_failures + 1 >= most_failures:
                self._queue.fail_work(each.work, each.code, each.reason)
                self.num_lost_in_row = 0
                if is_ended and each.code == OUT_OF_MEMORY:
                    self._queue.refuse_longer(each.work)
            else:
                self._return(*each.work.parts())

    def _deliver(self, work: OwnedBatch, message: Encoded) -> None:
        self.num_lost_in_row = 0
        self.memory = message.memory or self.memory
        self._tuner.observe_encoded(work, message.seconds * message.share, message.memory)
        self._queue.deliver(work, message.results, message.seconds, message.collate_seconds, message.share)

    def _end(self, number: int) -> OwnedBatch:
        self.started.pop(number, None)
        self._tuner.note(self.outstanding[number].batch)
        return self.outstanding.pop(number)

    def _return(self, *works: OwnedBatch) -> None:
        self._returned = sorted([*works, *self._returned], key=lambda work: not work.is_urgent)

    def lose(self, loss: RunnerLost) -> None:
        """Take back the batches of a lost runner, so that the next one encodes them.

        They are built anew, because the budget or the next encoder may differ from those they were built for. Batches
        that one of their sequences may have failed keep their sequences.
        """
        check = self.check
        self.is_sickness = loss.is_sick or (loss.failed is not None and loss.failed.number in check.numbers)
        self._salvage(loss)
        check.end()
        self.started.clear()
        self._return(*self.outstanding.values())
        self.outstanding.clear()
        self.rebuild()
        self.num_lost_in_row += 1

    def _salvage(self, loss: RunnerLost) -> None:
        """Decide which of the lost runner's batches are to blame; the others stay outstanding.

        No batch is to blame if somebody else ended the process or if it is sick. A batch that failed as it might
        on a runner that goes on is tried again in parts, and so is one whose process was killed for lack of memory: its
        text is given up for that, like one that an allocator refused.
        """
        self._return(*(work for work, _ in self.check.withheld))
        self.check.withheld = []
        if self.is_sickness:
            self._retry_failed()
            return
        if loss.failed is not None:
            self.receive(loss.failed)
            self._settle(is_ended=True)
            return
        self._return(*(failed.work for failed in self.check.failed))
        self.check.failed = []
        was_full = self.memory is not None and self.memory.used_share >= NEARLY_ALL_MEMORY
        is_exhausted = loss.is_exhausted or (loss.is_foreign and was_full)
        if loss.is_foreign and not is_exhausted:
            return
        works = [self._end(number) for number in list(self.started) if number in self.outstanding]
        for work in works:
            if is_exhausted:
                self._observe_out_of_memory(work, str(loss))
        if is_exhausted and len(works) == 1:
            self.check.failed.append(FailedBatch(works[0], OUT_OF_MEMORY, str(loss)))
            self._settle(is_ended=True)
        elif is_exhausted and any(len(work.sequences) > 1 for work in works):
            self._return(*(part for work in works for part in work.parts()))
        elif len(works) == 1:
            self._queue.lose_work(works[0], str(loss))
        else:  # which of them is to blame is not known
            num_failures = int(is_exhausted)
            self._suspects += [
                replace(work, is_suspect=True, num_failures=work.num_failures + num_failures)
                for work in works
            ]

    def _retry_failed(self) -> None:
        """Try failed batches again in parts, and failed sequences alone in the next runner.

        Lose a sequence that has made that runner sick too.
        """
        failed, self.check.failed = self.check.failed, []
        for work, reason in ((each.work, each.reason) for each in failed):
            num_sickened = work.num_sickened + work.is_suspect
            if len(work.sequences) > 1:
                self._return(*work.parts())
            elif num_sickened >= SICKENED_BY_ONE:
                self._queue.lose_work(work, f"it could not encode a known text after them ({reason})")
            else:
                self._suspects.append(replace(work, is_suspect=True, num_sickened=num_sickened))


def find_misfit(results: Ragged, dimension: int | None) -> str:
    """Return why the results are not vectors of this dimension; empty if they are, or if it is None."""
    if dimension is None:
        return ""
    if results.values.dtype != np.float32:
        return f"its results are {results.values.dtype}, not float32 vectors"
    lengths = results.lengths
    if (lengths == dimension).all():
        return ""
    other = int(lengths[lengths != dimension][0])
    return (
        f"its results have {other} values, and vectors of this model have {dimension}; an encoder whose results are "
        "not vectors must report that (gives_vectors)"
    )
