"""Trial: a model process apart from the one in service, in which one way of running the model is measured."""

import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Final, Self, TypeVar

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderReport
from worker.runner.messages import BATCHES_AHEAD, Encode, Encoded, EncodeFailed, Loaded, LoadFailed
from worker.runner.runner import RunnerLost
from worker.runner.starter import RunnerStarter

# How long a request to stop may go unnoticed.
LOOK_SECONDS: Final = 0.5

Message = TypeVar("Message")


class TrialFailed(Exception):
    """The model cannot be run in this way; the message says why, without a full stop."""


class TrialStopped(Exception):
    """The trial was asked to stop."""


class Trial:
    """A context manager around one model process, which loads the model when it is entered.

    Loading may take `load_seconds`, and each answer `answer_seconds`. Entering and all methods raise TrialFailed, and
    TrialStopped once `stopping` is set.
    """

    def __init__(
        self,
        starter: RunnerStarter,
        *,
        load_seconds: float,
        answer_seconds: float,
        stopping: threading.Event | None = None,
    ) -> None:
        self._starter = starter
        self._load_seconds = load_seconds
        self._answer_seconds = answer_seconds
        self._stopping = stopping or threading.Event()
        self._num_sent = 0

    def __enter__(self) -> Self:
        try:
            self._runner = self._starter.start()
        except RunnerLost as error:
            raise TrialFailed(f"the model process ended: {error}") from error
        try:
            loaded = self._listen(Loaded, self._load_seconds)[0]
        except BaseException:
            self._runner.kill()
            raise
        self.report: EncoderReport = loaded.report
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.stop()

    def encode(self, batches: Sequence[Batch]) -> list[Ragged]:
        """Return the results of batches, in their order."""
        results = {encoded.number: encoded.results for encoded in self._stream(batches)}
        return [results[number] for number in sorted(results)]

    def measure(self, batches: Sequence[Batch]) -> float:
        """Return the seconds that the process takes for these batches."""
        started = time.perf_counter()
        # Results are dropped, since a worker soon frees the shared memory in which they and the next batches travel.
        for _ in self._stream(batches):
            pass
        return time.perf_counter() - started

    def _stream(self, batches: Sequence[Batch]) -> Iterator[Encoded]:
        """Yield the answers to batches as they come, with as many in flight as a worker has."""
        most, first = self.report.num_started + BATCHES_AHEAD, self._num_sent
        num_done = 0
        while num_done < len(batches):
            while self._num_sent - first < len(batches) and self._num_sent - first - num_done < most:
                self._send(Encode(self._num_sent, batches[self._num_sent - first], is_urgent=False))
                self._num_sent += 1
            answers = self._listen(Encoded, self._answer_seconds)
            num_done += len(answers)
            yield from answers

    def _send(self, message: Encode) -> None:
        try:
            self._runner.send(message)
        except RunnerLost as error:
            raise TrialFailed(f"the model process ended: {error}") from error

    def _listen(self, kind: type[Message], seconds: float) -> list[Message]:
        """Return the next messages of this kind."""
        deadline = time.monotonic() + seconds
        while True:
            if self._stopping.is_set():
                raise TrialStopped
            if time.monotonic() >= deadline:
                raise TrialFailed(f"it took more than {seconds:g} s")
            if not wait(self._runner.connections, LOOK_SECONDS):
                continue
            try:
                said = self._runner.receive()
            except RunnerLost as error:
                raise TrialFailed(f"the model process ended: {error}") from error
            for message in said:
                if isinstance(message, LoadFailed | EncodeFailed):
                    raise TrialFailed(message.reason.rstrip("."))
            if found := [message for message in said if isinstance(message, kind)]:
                return found
