"""The program of a model process: it loads one encoder, encodes batches, and dies with its parent.

It knows nothing about requests, chunks or the pool. One thread reads and prepares batches while others
encode, one for each stream of the encoder. An urgent batch is encoded as soon as a stream has finished what
it has started.
"""

import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from queue import Empty, PriorityQueue
from typing import Final, NoReturn

from vectormill.domain.errors import ModelError
from vectormill.processes.lifetimes import die_with_parent
from vectormill.processes.logs import begin_logging
from vectormill.ragged import Ragged
from worker.devices.device import CUDA
from worker.encoder.encoder import DeviceLost, Encoder, EncoderOrder, ForwardPass, OnRead
from worker.encoder.memory import is_out_of_memory
from worker.runner.card_use import CardUse
from worker.runner.channel import Channel
from worker.runner.memory import MemoryGauge, cap_allocator
from worker.runner.messages import (
    BATCHES_AHEAD,
    KNOWN_BATCHES_AHEAD,
    LONGEST_QUEUED_SECONDS,
    URGENT_BATCHES_AHEAD,
    Encode,
    Encoded,
    EncodeFailed,
    Load,
    Loaded,
    LoadFailed,
    Reading,
    Started,
)
from worker.runner.runner import answer_with_stacks

logger = logging.getLogger(__name__)

READING_PAUSE_SECONDS: Final = 0.25
# How long a thread keeps Python's lock while others want it, by default 0.005. Each launch of a kernel wants it once,
# and a launch that waits for the thread that reads and prepares the next batch leaves a GPU idle.
SWITCH_SECONDS: Final = 0.0005
LONGEST_REASON: Final = 500

# The exit status if the device was lost, after which every batch would fail. The worker starts another
# process.
DEVICE_LOST_STATUS: Final = 3
THREAD_FAILED_STATUS: Final = 4


# A waiting batch: whether it is not urgent, its number of arrival, and its run. The smallest is encoded next.
# Numbers of arrival differ, so runs are never compared.
Waiting = tuple[bool, int, "BatchRun"]
# The outcome of a batch, and the block of shared memory for it.
Outcome = tuple[Encoded | EncodeFailed, int | None]


class DeviceShares:
    """A clock that several streams share, so that the sum of their times is the time the device computed.

    It runs slower the more streams compute at the same time. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_active = 0
        self._read_at = 0.0
        self._reading = 0.0

    def enter(self) -> float:
        """Return the clock's reading at which a stream begins to compute."""
        return self._change(1)

    def leave(self) -> float:
        """Return the clock's reading at which a stream ends computing."""
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
    """Encodes batches in turn.

    If the device has a queue, a batch is started before the one before it is done. The next batch is started
    before the last outcome is sent, so that a separate device does not wait while results are written. It is
    chosen only then, so that an urgent batch can overtake until the last moment.
    """

    def __init__(
        self, channel: Channel, batches: "PriorityQueue[Waiting]", gauge: MemoryGauge, *, is_queued: bool
    ) -> None:
        self._channel = channel
        self._batches = batches
        self._gauge = gauge
        self._is_queued = is_queued
        # Batches that were started and are not done yet, in the order of the device.
        self._started: deque[BatchRun] = deque()
        self._done_at = -math.inf  # when the last batch was done
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
        """Return how many batches to have started. After a long one, an urgent one would wait for both."""
        return 2 if self._is_queued and self._last_seconds < LONGEST_QUEUED_SECONDS else 1

    def _start_next(self, *, must_wait: bool) -> bool:
        """Start the next batch. If there is none, wait for one if `must_wait`, else return False."""
        try:
            *_, run = self._batches.get(block=must_wait)
        except Empty:
            return False
        self._channel.send(Started(run.number))
        run.start()
        self._started.append(run)
        return True

    def _finish_first(self) -> "Outcome | None":
        """Finish the first started batch.

        Return its outcome, or None if it was urgent and was sent at once.
        """
        run = self._started.popleft()
        outcome = run.finish(self._gauge, self._done_at)
        self._done_at = time.perf_counter()
        if isinstance(outcome, Encoded):
            self._last_seconds = outcome.seconds
        if not run.is_urgent:
            return outcome, run.block
        # Somebody waits for an urgent outcome, so send it even before the next batch is started.
        self._channel.send(outcome, run.block)
        return None


class BatchRun:
    """One batch from its preparation to its outcome: its results, or the error that a step raised."""

    def __init__(
        self,
        message: Encode,
        encoder: Encoder,
        shares: DeviceShares | None = None,
        block: int | None = None,
        use: CardUse | None = None,
    ) -> None:
        """Prepare the batch.

        `shares` is the common clock if several streams compute side by side, and `use` tells how many processes do.
        `block` is the block of shared memory in which the batch arrived, which is to hold its results.
        """
        self.number = message.number
        self.block = block
        self._encoder = encoder
        self._shares = shares
        self._use = use
        self._share = 1.0
        self.is_urgent = message.is_urgent
        self._num_sequences = len(message.batch)
        self._started_at = 0.0
        self._begun = 0.0  # on the shared clock
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
            # Take the time from here and not from `finish`: an asynchronous device computes while other
            # outcomes are sent.
            self._begun = self._shares.enter() if self._shares is not None else 0.0
            self._share = self._use.enter() if self._use is not None else 1.0
            try:
                self._forward_pass.start()
            except Exception as error:  # noqa: BLE001 - as above
                if self._shares is not None:
                    self._shares.leave()
                if self._use is not None:
                    self._use.leave()
                self._note(error)

    def finish(self, gauge: MemoryGauge, device_free_at: float) -> Encoded | EncodeFailed:
        """Return the outcome. Its seconds are counted from when the device was free.

        Raises DeviceLost, which ends the process.
        """
        if self._forward_pass is not None:
            try:
                results, seconds = self._compute(self._forward_pass, device_free_at)
                memory = gauge.read()
                return Encoded(self.number, results, seconds, memory, self._collate_seconds, self._share)
            except Exception as error:  # noqa: BLE001 - as above
                self._note(error)
        if self._lost is not None:
            raise self._lost
        assert self._failed is not None
        return self._failed

    def _compute(self, forward_pass: ForwardPass, device_free_at: float) -> tuple[Ragged, float]:
        if self._shares is None:
            try:
                results = forward_pass.results()
            finally:
                if self._use is not None:  # others begin and end meanwhile, so the mean of both ends counts
                    self._share = (self._share + self._use.leave()) / 2
            seconds = time.perf_counter() - max(self._started_at, device_free_at)
            return results, max(0.0, seconds - self._encoder.take_waited_seconds())
        ended = 0.0
        try:
            results = forward_pass.results()
        finally:
            ended = self._shares.leave()
        return results, ended - self._begun

    def _note(self, error: Exception) -> None:
        """Keep what has to be reported of the error, but not the error itself.

        Its traceback refers to the frames of the forward pass, and so to tensors whose memory the next batch
        needs. Nothing else is freed after an out-of-memory error: before torch raises one, its allocator has
        given all cached memory back to CUDA and tried again.
        """
        self._forward_pass = None
        if isinstance(error, DeviceLost):
            self._lost = error
            return
        reason, is_exhausted = describe_error(error), is_out_of_memory(error)
        if not is_exhausted:  # the executor logs out-of-memory errors once
            logger.warning("A batch of %d sequences failed: %s", self._num_sequences, reason)
        self._failed = EncodeFailed(self.number, reason, is_exhausted)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]


def main(
    parent_pid: int,
    pipe_descriptor: int,
    memory_descriptor: int,
    stacks_descriptor: int,
    log_format: str,
    log_level: str,
) -> NoReturn:
    # Use SIGKILL: a native call that hangs runs no Python handler, and a GPU must not stay occupied.
    die_with_parent(signal.SIGKILL, parent_pid)
    # Ctrl-C in a terminal is for the worker, which first finishes its chunks with this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer_with_stacks(stacks_descriptor)
    sys.setswitchinterval(SWITCH_SECONDS)
    line = "%(asctime)s runner %(levelname)s %(message)s"
    begin_logging("runner", log_level, log_format, line=line, stream=sys.stderr)
    channel = Channel(Connection(pipe_descriptor), memory_descriptor, is_worker=False)

    def load_and_serve() -> None:
        load, _ = channel.receive()
        gauge = MemoryGauge(load.order.device)
        serve(channel, _load(channel, load, gauge), gauge, _watch_card(load.order))

    _end_with(load_and_serve)


def _end_with(act: Callable[[], None]) -> NoReturn:
    """Run `act`, the work of the process, in this thread. End the process when it ends for any reason."""
    try:
        act()
    except (EOFError, OSError):
        logger.info("The worker has exited or needs no more vectors.")
    except DeviceLost as error:
        logger.error("The device was lost; ending this process: %s", error)
        os._exit(DEVICE_LOST_STATUS)
    except BaseException:
        logger.exception("The thread %r failed; ending the model process.", threading.current_thread().name)
        os._exit(THREAD_FAILED_STATUS)
    os._exit(0)


def _load(channel: Channel, load: Load, gauge: MemoryGauge) -> Encoder:
    """Load the encoder on the cores of its device. If that fails, send the reason and end the process."""
    if load.order.device.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, load.order.device.cores)
    try:
        cap_allocator(load.order.device)
        module, _, function = load.factory.partition(":")
        encoder: Encoder = getattr(importlib.import_module(module), function)(
            replace(
                load.order,
                on_read=_tell_reading(channel),
                on_backend=lambda name: channel.send(Reading(0, 0, name)),
            )
        )
    except ModelError as error:
        channel.send(LoadFailed(str(error)))
    except Exception as error:  # a framework may raise anything, and the worker must get the reason
        logger.exception("Cannot load the model.")
        channel.send(LoadFailed(f"Cannot load the model {load.order.card.name!r}: {describe_error(error)}"))
    else:
        channel.send(Loaded(encoder.describe(), gauge.read()))
        return encoder
    os._exit(1)


def _tell_reading(channel: Channel) -> OnRead:
    """Return a callback that reports the progress of loading, at most four times a second."""
    told_at = -math.inf

    def tell(num_bytes_read: int, num_bytes: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= READING_PAUSE_SECONDS:
            told_at = time.monotonic()
            channel.send(Reading(num_bytes_read, num_bytes))

    return tell


def _watch_card(order: EncoderOrder) -> CardUse | None:
    """Return the use of the GPU that several workers share; None if this one has it alone, or no file can be locked."""
    if order.device.kind != CUDA or order.device.num_parts == 1:
        return None
    try:
        return CardUse(order.cache_dir, order.device.card or order.device.uuid or order.device.name)
    except OSError as error:
        logger.warning("The time of other workers on %s is counted as its own: %s", order.device.name, error)
        return None


def serve(channel: Channel, encoder: Encoder, gauge: MemoryGauge, use: CardUse | None = None) -> None:
    """Encode batches until the pipe is closed, in this thread and in one more for each further stream."""
    report = encoder.describe()
    # The queue is never full, because the executor limits what it sends: a blocked reader would not see the
    # pipe close.
    num_batches = report.num_started + BATCHES_AHEAD + URGENT_BATCHES_AHEAD
    batches: PriorityQueue[Waiting] = PriorityQueue(num_batches + report.num_streams + KNOWN_BATCHES_AHEAD)
    shares = DeviceShares() if report.num_streams > 1 else None
    threads: dict[str, Callable[[], None]] = {
        "reader": partial(_read, channel, batches, encoder, shares, use)
    }
    first, *others = (
        Stream(channel, batches, gauge, is_queued=report.is_queued) for _ in range(report.num_streams)
    )
    threads |= {f"stream {number}": stream.serve for number, stream in enumerate(others, start=1)}
    for name, act in threads.items():
        threading.Thread(target=_end_with, args=(act,), name=name, daemon=True).start()
    first.serve()


def _read(
    channel: Channel,
    batches: "PriorityQueue[Waiting]",
    encoder: Encoder,
    shares: DeviceShares | None,
    use: CardUse | None,
) -> None:
    """Read and prepare batches. When the parent closes the pipe, end the process, even in a forward pass.

    Batches of equal urgency are encoded in the order of arrival, not by number: ranks that share a model are
    sent the same batches in the same order, in which urgent ones have already overtaken.
    """
    for place in count():
        message, block = channel.receive()
        run = BatchRun(message, encoder, shares, block, use)
        batches.put((not run.is_urgent, place, run))
