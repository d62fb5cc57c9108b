"""The process that holds one encoder: loads it, encodes what is sent, and dies with its parent.

Knows nothing of requests, chunks or the pool. A thread reads the next batches while the main thread encodes; an urgent
one is encoded as soon as the current one is done.
"""

import importlib
import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from queue import PriorityQueue
from typing import Any, Final, NoReturn

from vectormill.domain.errors import ModelError
from vectormill.processes import die_with_parent
from worker.model.encoder import Encoder
from worker.parallel.messages import (
    BATCHES_AHEAD,
    URGENT_BATCHES_AHEAD,
    Encode,
    Encoded,
    EncodeFailed,
    Load,
    Loaded,
    LoadFailed,
    Started,
)

logger = logging.getLogger(__name__)

LONGEST_REASON: Final = 500

# Not urgent, number, batch: the least is encoded next. Numbers differ, so that batches are never compared.
_Waiting = tuple[bool, int, Encode]


def main(file_descriptor: int, parent_pid: int) -> NoReturn:
    # SIGKILL: a native call that hangs runs no Python handler, and a GPU must not stay occupied.
    die_with_parent(signal.SIGKILL, parent_pid)
    # A terminal's Ctrl-C goes to the worker, which first finishes its chunks here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s runner %(levelname)s %(message)s"
    )
    connection: Connection[Any, Any] = Connection(file_descriptor)
    try:
        load: Load = connection.recv()
        encoder = _load(connection, load)
        serve(connection, encoder)
    except (EOFError, OSError):
        logger.info("The worker is gone or wants no more vectors.")
    os._exit(0)


def _load(connection: "Connection[Any, Any]", load: Load) -> Encoder:
    """The encoder, on the cores of its device; a reason is sent and the process ends when it cannot be had."""
    if load.order.device.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, load.order.device.cores)
    try:
        module, _, function = load.factory.partition(":")
        encoder: Encoder = getattr(importlib.import_module(module), function)(load.order)
    except ModelError as error:
        connection.send(LoadFailed(str(error)))
    except Exception as error:  # whatever a framework raises, the worker must hear the reason
        logger.exception("The model cannot be loaded.")
        connection.send(LoadFailed(f"The model {load.order.card.name!r} cannot be loaded: {_reason(error)}"))
    else:
        connection.send(Loaded(encoder.describe()))
        return encoder
    os._exit(1)


def serve(connection: "Connection[Any, Any]", encoder: Encoder) -> None:
    """Encodes batch after batch until the pipe is closed."""
    # Never full, because the executor sends no more: a reader that waits here would not see the pipe close.
    batches: PriorityQueue[_Waiting] = PriorityQueue(BATCHES_AHEAD + URGENT_BATCHES_AHEAD)
    threading.Thread(target=_read, args=(connection, batches), name="reader", daemon=True).start()
    while True:
        *_, message = batches.get()
        connection.send(Started(message.number))
        start = time.perf_counter()
        try:
            vectors = encoder.encode(message.batch)
        except Exception as error:  # noqa: BLE001 - a bad sequence may raise anything; the executor isolates it
            logger.warning("A batch of %d sequences failed: %s", len(message.batch), _reason(error))
            connection.send(EncodeFailed(message.number, _reason(error)))
        else:
            connection.send(Encoded(message.number, vectors, time.perf_counter() - start))


def _read(connection: "Connection[Any, Any]", batches: "PriorityQueue[_Waiting]") -> None:
    """Ends the process at once when the parent closes the pipe, even in the middle of a forward pass."""
    try:
        while True:
            message: Encode = connection.recv()
            batches.put((not message.is_urgent, message.number, message))
    except (EOFError, OSError):
        os._exit(0)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]
