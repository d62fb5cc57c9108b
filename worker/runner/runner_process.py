"""The process that holds one encoder: loads it, encodes what is sent, and dies with its parent.

Knows nothing of requests, chunks or the pool. A thread reads and prepares the next batches while others encode, one a
stream of the encoder; an urgent batch is encoded as soon as a stream has done what it has started.
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
from itertools import count
from multiprocessing.connection import Connection
from queue import PriorityQueue
from typing import Final, NoReturn

from vectormill.domain.errors import ModelError
from vectormill.processes.lifetimes import die_with_parent
from vectormill.processes.logs import begin_logging
from worker.encoder.encoder import DeviceLost, Encoder, OnRead
from worker.runner.channel import Channel
from worker.runner.memory import MemoryGauge
from worker.runner.messages import (
    BATCHES_AHEAD,
    CANARIES_AHEAD,
    URGENT_BATCHES_AHEAD,
    Load,
    Loaded,
    LoadFailed,
    Reading,
)
from worker.runner.stacks import answer_with_stacks
from worker.runner.stream import BatchRun, DeviceShares, Stream, Waiting, describe_error

logger = logging.getLogger(__name__)

READING_PAUSE_SECONDS: Final = 0.25

# Ends the process, so that the worker starts another: what a device once lost answers with errors, for every batch.
DEVICE_LOST_STATUS: Final = 3
THREAD_FAILED_STATUS: Final = 4


def main(
    parent_pid: int, pipe_descriptor: int, memory_descriptor: int, stacks_descriptor: int, log_format: str
) -> NoReturn:
    # SIGKILL: a native call that hangs runs no Python handler, and a GPU must not stay occupied.
    die_with_parent(signal.SIGKILL, parent_pid)
    # A terminal's Ctrl-C goes to the worker, which first finishes its chunks here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer_with_stacks(stacks_descriptor)
    line = "%(asctime)s runner %(levelname)s %(message)s"
    begin_logging("runner", logging.INFO, log_format, line=line, stream=sys.stderr)
    channel = Channel(Connection(pipe_descriptor), memory_descriptor, is_worker=False)
    _end_with(partial(_load_and_serve, channel))


def _end_with(act: Callable[[], None]) -> NoReturn:
    """Do in this thread what the process exists for, and end the process with it, however it ends."""
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


def _load_and_serve(channel: Channel) -> None:
    load, _ = channel.receive()
    gauge = MemoryGauge(load.order.device)
    serve(channel, _load(channel, load, gauge), gauge)


def _load(channel: Channel, load: Load, gauge: MemoryGauge) -> Encoder:
    """Load the encoder, on the cores of its device. On failure send the reason and end the process."""
    if load.order.device.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, load.order.device.cores)
    try:
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
    except Exception as error:  # whatever a framework raises, the worker must hear the reason
        logger.exception("The model cannot be loaded.")
        channel.send(
            LoadFailed(f"The model {load.order.card.name!r} cannot be loaded: {describe_error(error)}")
        )
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


def serve(channel: Channel, encoder: Encoder, gauge: MemoryGauge) -> None:
    """Encode batches until the pipe is closed: in this thread, and in one more for each further stream."""
    report = encoder.describe()
    # Never full, because the executor sends no more: a reader that waits here would not see the pipe close.
    num_batches = report.num_started + BATCHES_AHEAD + URGENT_BATCHES_AHEAD
    batches: PriorityQueue[Waiting] = PriorityQueue(num_batches + report.num_streams + CANARIES_AHEAD)
    shares = DeviceShares() if report.num_streams > 1 else None
    threads: dict[str, Callable[[], None]] = {"reader": partial(_read, channel, batches, encoder, shares)}
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
) -> None:
    """Read and prepare batches. When the parent closes the pipe, the process ends at once, even in a forward pass.

    Those that are equally urgent are encoded as they come, not by number: ranks that share a model are sent the same
    ones in the same order, in which urgent ones have overtaken already.
    """
    for place in count():
        message, _ = channel.receive()
        run = BatchRun(message, encoder, shares)
        batches.put((not run.is_urgent, place, run))
