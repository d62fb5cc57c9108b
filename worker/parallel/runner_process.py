"""The process that holds one encoder: loads it, encodes what is sent, and dies with its parent.

Knows nothing of requests, chunks or the pool. A thread reads and prepares the next batches while others encode, one a
stream of the encoder; an urgent batch is encoded as soon as a stream has done its current one.
"""

import importlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, PriorityQueue
from typing import Any, Final, NoReturn

from vectormill.domain.errors import ModelError
from vectormill.processes import die_with_parent
from worker.model.encoder import Encoder, OnRead
from worker.model.exhaustion import is_out_of_memory
from worker.model.forward_pass import DeviceLost, ForwardPass
from worker.parallel.memory import MemoryGauge
from worker.parallel.messages import (
    BATCHES_AHEAD,
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
from worker.parallel.stacks import answer_with_stacks

logger = logging.getLogger(__name__)

LONGEST_REASON: Final = 500
READING_PAUSE_SECONDS: Final = 0.25

# Ends the process, so that the worker starts another: what a device once lost answers with errors, for every batch.
DEVICE_LOST_STATUS: Final = 3
THREAD_FAILED_STATUS: Final = 4

# Not urgent, number, run: the least is encoded next. Numbers differ, so that runs are never compared.
_Waiting = tuple[bool, int, "_Run"]


def main(file_descriptor: int, parent_pid: int, stacks_descriptor: int) -> NoReturn:
    # SIGKILL: a native call that hangs runs no Python handler, and a GPU must not stay occupied.
    die_with_parent(signal.SIGKILL, parent_pid)
    # A terminal's Ctrl-C goes to the worker, which first finishes its chunks here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer_with_stacks(stacks_descriptor)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s runner %(levelname)s %(message)s"
    )
    connection: Connection[Any, Any] = Connection(file_descriptor)
    _end_with(partial(_load_and_serve, connection))


def _end_with(act: Callable[[], None]) -> NoReturn:
    """Does in this thread what the process lives for, and ends the process with it, however it ends."""
    try:
        act()
    except (EOFError, OSError):
        logger.info("The worker is gone or wants no more vectors.")
    except DeviceLost as error:
        logger.error("The device is lost to this process, which ends: %s", error)
        os._exit(DEVICE_LOST_STATUS)
    except BaseException:
        logger.exception(
            "The thread %r failed, and so ends the model process.", threading.current_thread().name
        )
        os._exit(THREAD_FAILED_STATUS)
    os._exit(0)


def _load_and_serve(connection: "Connection[Any, Any]") -> None:
    load: Load = connection.recv()
    gauge = MemoryGauge(load.order.device)
    serve(connection, _load(connection, load, gauge), gauge)


def _load(connection: "Connection[Any, Any]", load: Load, gauge: MemoryGauge) -> Encoder:
    """The encoder, on the cores of its device; a reason is sent and the process ends when it cannot be had."""
    if load.order.device.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, load.order.device.cores)
    try:
        module, _, function = load.factory.partition(":")
        encoder: Encoder = getattr(importlib.import_module(module), function)(
            replace(load.order, on_read=_tell_reading(connection))
        )
    except ModelError as error:
        connection.send(LoadFailed(str(error)))
    except Exception as error:  # whatever a framework raises, the worker must hear the reason
        logger.exception("The model cannot be loaded.")
        connection.send(LoadFailed(f"The model {load.order.card.name!r} cannot be loaded: {_reason(error)}"))
    else:
        connection.send(Loaded(encoder.describe(), gauge.read()))
        return encoder
    os._exit(1)


def _tell_reading(connection: "Connection[Any, Any]") -> OnRead:
    """Says over the pipe how far loading is, but not more often than somebody watches."""
    told_at = -math.inf

    def tell(num_bytes_read: int, num_bytes: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= READING_PAUSE_SECONDS:
            told_at = time.monotonic()
            connection.send(Reading(num_bytes_read, num_bytes))

    return tell


def serve(connection: "Connection[Any, Any]", encoder: Encoder, gauge: MemoryGauge) -> None:
    """Encodes batch after batch until the pipe is closed: in this thread, and in one for each further stream."""
    num_streams = encoder.describe().num_streams
    # Never full, because the executor sends no more: a reader that waits here would not see the pipe close.
    batches: PriorityQueue[_Waiting] = PriorityQueue(num_streams + BATCHES_AHEAD + URGENT_BATCHES_AHEAD)
    stream = partial(_serve_stream, Speaker(connection), batches, gauge)
    threads = {"reader": partial(_read, connection, batches, encoder, num_streams)}
    threads |= {f"stream {number}": stream for number in range(1, num_streams)}
    for name, act in threads.items():
        threading.Thread(target=_end_with, args=(act,), name=name, daemon=True).start()
    stream()


class Speaker:
    """The sending end of the pipe, for several threads."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, message: object) -> None:
        with self._lock:
            self._connection.send(message)


def _serve_stream(speaker: Speaker, batches: "PriorityQueue[_Waiting]", gauge: MemoryGauge) -> None:
    """Encodes one batch at a time.

    The next batch is started before the outcome of the last one is sent, so that a device of its own does not wait for
    pickling and the pipe. It is chosen only then, so that an urgent one overtakes until the last moment.
    """
    current: _Run | None = None
    while True:
        outcome = None if current is None else current.finish(gauge)
        if current is not None and current.is_urgent:
            # Somebody waits for it: not even the start of the next batch comes first.
            speaker.say(outcome)
            outcome = None
        current = _take(batches, must_wait=outcome is None)
        if current is not None:
            speaker.say(Started(current.number))
            current.start()
        if outcome is not None:
            speaker.say(outcome)


class _Run:
    """One batch from its preparation to its outcome: the vectors, or what any step on the way raised."""

    def __init__(self, message: Encode, encoder: Encoder, num_streams: int) -> None:
        self.number = message.number
        self._num_streams = num_streams
        self.is_urgent = message.is_urgent
        self._num_sequences = len(message.batch)
        self._started_at = 0.0
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
            try:
                self._forward_pass.start()
            except Exception as error:  # noqa: BLE001 - as above
                self._note(error)

    def finish(self, gauge: MemoryGauge) -> Encoded | EncodeFailed:
        """Raises DeviceLost, whose batch the executor finds by the process that ended."""
        if self._forward_pass is not None:
            try:
                vectors = self._forward_pass.vectors()
                seconds = (time.perf_counter() - self._started_at) / self._num_streams
                return Encoded(self.number, vectors, seconds, gauge.read(), self._collate_seconds)
            except Exception as error:  # noqa: BLE001 - as above
                self._note(error)
        if self._lost is not None:
            raise self._lost
        assert self._failed is not None
        return self._failed

    def _note(self, error: Exception) -> None:
        """Keeps what is to be said of the error, and not the error: its traceback holds the frames of the forward pass,
        and with them the tensors, and the next batch needs their memory.

        That is all that is freed here. Nothing is emptied after an out-of-memory: before torch raises one, its
        allocator has given all it kept back to CUDA and tried again.
        """
        self._forward_pass = None
        if isinstance(error, DeviceLost):
            self._lost = error
            return
        reason, is_exhausted = _reason(error), is_out_of_memory(error)
        if not is_exhausted:  # of the other, the executor says it once
            logger.warning("A batch of %d sequences failed: %s", self._num_sequences, reason)
        self._failed = EncodeFailed(self.number, reason, is_exhausted)


def _take(batches: "PriorityQueue[_Waiting]", *, must_wait: bool) -> _Run | None:
    """The next batch; None when there is none and nobody may be kept waiting for it."""
    try:
        *_, run = batches.get(block=must_wait)
    except Empty:
        return None
    return run


def _read(
    connection: "Connection[Any, Any]", batches: "PriorityQueue[_Waiting]", encoder: Encoder, num_streams: int
) -> None:
    """Prepares batches. When the parent closes the pipe, the process ends at once, even in a forward pass."""
    while True:
        run = _Run(connection.recv(), encoder, num_streams)
        batches.put((not run.is_urgent, run.number, run))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]
