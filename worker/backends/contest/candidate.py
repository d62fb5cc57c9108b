"""Candidate: one backend in a contest, in a process of its own. Knows not what it is compared with."""

import importlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.processes.lifetimes import die_with_parent
from worker.batching.token_batch import TokenBatch
from worker.encoder.encoder import Encoder, EncoderOrder

LOADER: Final = "worker.backends.factory:load_encoder"
LONGEST_REASON: Final = 300


class CandidateLost(Exception):
    """The candidate cannot run the model. `is_lasting` when it would not the next time either."""

    def __init__(self, reason: str, *, is_lasting: bool = False) -> None:
        super().__init__(reason)
        self.is_lasting = is_lasting


@dataclass(frozen=True, slots=True)
class Answer:
    """From the process: the seconds that it took, or why it could not."""

    seconds: float = 0.0
    failure: str = ""
    is_lasting: bool = False


class Candidate:
    """A started process and the pipe to it. Used by one thread."""

    def __init__(self, order: EncoderOrder, loader: str = LOADER) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        # No daemon: openvino's candidate starts a process that converts.
        self._process = context.Process(target=serve, args=(theirs, order, loader, os.getpid()))
        self._process.start()
        theirs.close()

    def wait_until_loaded(self, timeout_seconds: float) -> float:
        """Raises CandidateLost."""
        return self._receive(timeout_seconds)

    def measure_seconds(self, batch: TokenBatch, timeout_seconds: float) -> float:
        """Of one forward pass, or its share where several run side by side. Raises CandidateLost."""
        try:
            self._connection.send(batch)
        except OSError:
            raise CandidateLost(self._describe_end()) from None
        return self._receive(timeout_seconds)

    def stop(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()

    def _receive(self, timeout_seconds: float) -> float:
        try:
            if not self._connection.poll(timeout_seconds):
                raise CandidateLost(f"it took more than {timeout_seconds:g} s")
            answer: Answer = self._connection.recv()
        except (EOFError, OSError):
            raise CandidateLost(self._describe_end()) from None
        if answer.failure:
            raise CandidateLost(answer.failure, is_lasting=answer.is_lasting)
        return answer.seconds

    def _describe_end(self) -> str:
        self._process.join(5)
        status = self._process.exitcode
        if status is not None and status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"


def serve(connection: "Connection[Any, Any]", order: EncoderOrder, loader: str, parent_pid: int) -> None:
    """The life of the process: loads, then times batch after batch until the pipe is closed."""
    # SIGKILL: a native call that hangs runs no Python handler.
    die_with_parent(signal.SIGKILL, parent_pid)
    if order.device.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order.device.cores)
    try:
        module, _, function = loader.partition(":")
        encoder: Encoder = getattr(importlib.import_module(module), function)(order)
        num_streams = encoder.describe().num_streams
        connection.send(Answer())
        with ThreadPoolExecutor(num_streams) as streams:
            while True:
                batch = connection.recv()
                start = time.perf_counter()
                list(streams.map(encoder.encode, [batch] * num_streams))
                connection.send(Answer(seconds=(time.perf_counter() - start) / num_streams))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # noqa: BLE001 - whatever a framework raises, the contest must hear the reason
        reason = str(error).strip() or type(error).__name__
        connection.send(Answer(failure=reason[:LONGEST_REASON], is_lasting=is_lasting_failure(error)))


def is_lasting_failure(error: Exception) -> bool:
    """What the model and the installed versions decide, and no other process on the machine."""
    return isinstance(error, ModelError) or type(error).__name__ == "ConversionFailed"
