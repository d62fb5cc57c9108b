"""Stream: one batch after another through an encoder, from its preparation to its outcome. Starts no process."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, PriorityQueue
from typing import Final, NoReturn

from vectormill.ragged import Ragged
from worker.encoder.encoder import DeviceLost, Encoder, ForwardPass
from worker.encoder.memory import is_out_of_memory
from worker.runner.channel import Channel
from worker.runner.memory import MemoryGauge
from worker.runner.messages import LONGEST_QUEUED_SECONDS, Encode, Encoded, EncodeFailed, Started

logger = logging.getLogger(__name__)

LONGEST_REASON: Final = 500

# Not urgent, place in which it came, run: the least is encoded next. Places differ, so that runs are never compared.
Waiting = tuple[bool, int, "BatchRun"]
# The outcome of a batch, and the block for it.
Outcome = tuple[Encoded | EncodeFailed, int | None]


class DeviceShares:
    """A clock shared by several streams. It runs slower the more of them compute at a moment, so that their readings
    add up to the time in which the device computed at all. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_active = 0
        self._read_at = 0.0
        self._reading = 0.0

    def enter(self) -> float:
        """Return the reading at which a stream begins to compute."""
        return self._change(1)

    def leave(self) -> float:
        """Return the reading at which it ends."""
        return self._change(-1)

    def _change(self, step: int) -> float:
        with self._lock:
            now = self._clock()
            if self._num_active:
                self._reading += (now - self._read_at) / self._num_active
            self._num_active += step
            self._read_at = now
            return self._reading


class Stream:
    """Encodes batches in turn; of a device that queues them, the next one is started before the last one is done.

    The next batch is started before the outcome of the last one is sent, so that a device of its own does not wait for
    writing down its results. It is chosen only then, so that an urgent one overtakes until the last moment.
    """

    def __init__(
        self, channel: Channel, batches: "PriorityQueue[Waiting]", gauge: MemoryGauge, *, is_queued: bool
    ) -> None:
        self._channel = channel
        self._batches = batches
        self._gauge = gauge
        self._is_queued = is_queued
        self._started: deque[BatchRun] = (
            deque()
        )  # and not yet done, in the order in which the device has them
        self._done_at = -math.inf  # the last one
        self._last_seconds = math.inf

    def serve(self) -> NoReturn:
        outcome: Outcome | None = None
        while True:
            while len(self._started) < self._num_to_start:
                if not self._start_next(must_wait=not self._started and outcome is None):
                    break
            if outcome is not None:
                self._channel.send(*outcome)
                outcome = None
            if self._started:
                outcome = self._finish_first()

    @property
    def _num_to_start(self) -> int:
        """Return how many batches to have started: behind a long one an urgent one would wait for both."""
        return 2 if self._is_queued and self._last_seconds < LONGEST_QUEUED_SECONDS else 1

    def _start_next(self, *, must_wait: bool) -> bool:
        """Start the next batch. Return False if there is none and nobody may wait for it."""
        try:
            *_, run = self._batches.get(block=must_wait)
        except Empty:
            return False
        self._channel.send(Started(run.number))
        run.start()
        self._started.append(run)
        return True

    def _finish_first(self) -> "Outcome | None":
        """Finish the first started batch. Return its outcome unless it is urgent and was sent at once."""
        run = self._started.popleft()
        outcome = run.finish(self._gauge, self._done_at)
        self._done_at = time.perf_counter()
        if isinstance(outcome, Encoded):
            self._last_seconds = outcome.seconds
        if not run.is_urgent:
            return outcome, run.block
        # Somebody waits for it: not even the start of the next batch comes first.
        self._channel.send(outcome, run.block)
        return None


class BatchRun:
    """One batch from its preparation to its outcome: the results, or what any step on the way raised."""

    def __init__(self, message: Encode, encoder: Encoder, shares: DeviceShares | None = None) -> None:
        """Prepare the batch. `shares` is the clock where several streams compute side by side."""
        self.number = message.number
        self.block = message.block
        self._shares = shares
        self.is_urgent = message.is_urgent
        self._num_sequences = len(message.batch)
        self._started_at = 0.0
        self._begun = 0.0  # by the shares' clock
        self._forward_pass: ForwardPass | None = None
        self._failed: EncodeFailed | None = None
        self._lost: DeviceLost | None = None
        collating_since = time.perf_counter()
        try:
            self._forward_pass = encoder.prepare(message.batch)
        except Exception as error:  # noqa: BLE001 - a bad sequence may raise anything; the executor isolates it
            self._note(error)
        self._collate_seconds = time.perf_counter() - collating_since

    def start(self) -> None:
        self._started_at = time.perf_counter()
        if self._forward_pass is not None:
            # From here on and not from `finish` on: what computes by itself does so while others are written to.
            self._begun = self._shares.enter() if self._shares is not None else 0.0
            try:
                self._forward_pass.start()
            except Exception as error:  # noqa: BLE001 - as above
                if self._shares is not None:
                    self._shares.leave()
                self._note(error)

    def finish(self, gauge: MemoryGauge, device_free_at: float) -> Encoded | EncodeFailed:
        """Return the outcome. Its seconds begin when the device was free. Raises DeviceLost, which ends the process."""
        if self._forward_pass is not None:
            try:
                results, seconds = self._compute(self._forward_pass, device_free_at)
                return Encoded(self.number, results, seconds, gauge.read(), self._collate_seconds)
            except Exception as error:  # noqa: BLE001 - as above
                self._note(error)
        if self._lost is not None:
            raise self._lost
        assert self._failed is not None
        return self._failed

    def _compute(self, forward_pass: ForwardPass, device_free_at: float) -> tuple[Ragged, float]:
        if self._shares is None:
            results = forward_pass.results()
            return results, time.perf_counter() - max(self._started_at, device_free_at)
        ended = 0.0
        try:
            results = forward_pass.results()
        finally:
            ended = self._shares.leave()
        return results, ended - self._begun

    def _note(self, error: Exception) -> None:
        """Keep what must be reported of the error, not the error: its traceback holds the frames of the forward pass,
        and with them tensors whose memory the next batch needs.

        That is all that is freed here. Nothing is emptied after an out-of-memory: before torch raises one, its
        allocator has given all it kept back to CUDA and tried again.
        """
        self._forward_pass = None
        if isinstance(error, DeviceLost):
            self._lost = error
            return
        reason, is_exhausted = describe_error(error), is_out_of_memory(error)
        if not is_exhausted:  # of the other, the executor says it once
            logger.warning("A batch of %d sequences failed: %s", self._num_sequences, reason)
        self._failed = EncodeFailed(self.number, reason, is_exhausted)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]
