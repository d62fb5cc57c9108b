"""RunnerGroup: the runners of one replica, which its executor treats as one. Knows no strategy.

All are given every batch, in one order, and all answer it: their vectors one behind the other, in the order of the
ranks, are the batch's. One that dies, or fails where the others do not, ends the group: its neighbours may be waiting
for it in the middle of a layer.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from worker.parallel.messages import Encode, Encoded, EncodeFailed, Load, Loaded, LoadFailed, Started
from worker.parallel.runner import Runner, RunnerLost

# A batch that no rank can encode fails on all of them at about the same time.
FAILURE_GRACE_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Outcome:
    """What the ranks have said of one batch, by rank."""

    parts: dict[int, Encoded] = field(default_factory=dict)
    failures: dict[int, EncodeFailed] = field(default_factory=dict)


class RunnerGroup:
    """Started processes and the pipes to them. Used by one thread; has the methods of a Runner."""

    def __init__(
        self,
        loads: Sequence[Load],
        environments: Sequence[Mapping[str, str]],
        meeting_place: "TemporaryDirectory[str]",
    ) -> None:
        self._meeting_place = meeting_place
        self._runners = [
            Runner(load, environment) for load, environment in zip(loads, environments, strict=True)
        ]
        self._loaded: dict[int, Loaded] = {}
        self._outcomes: dict[int, _Outcome] = {}
        self._begun: deque[int] = deque()  # by the first rank, and not yet ended by all

    @property
    def connections(self) -> "list[Connection[Any, Any]]":
        return [runner.connection for runner in self._runners]

    @property
    def pid(self) -> int:
        """Of the first rank."""
        return self._runners[0].pid

    def send(self, message: object) -> None:
        """Raises RunnerLost. Nothing overtakes: ranks that encode in different orders wait for each other for ever."""
        if isinstance(message, Encode):
            message = replace(message, is_urgent=False)
        for runner in self._runners:
            runner.send(message)

    def receive(self) -> list[Any]:
        """What the group as a whole has to say now; perhaps nothing yet. Raises RunnerLost."""
        said = self._listen(0)
        deadline = time.monotonic() + FAILURE_GRACE_SECONDS
        while failed := [outcome for outcome in self._outcomes.values() if outcome.failures]:
            if time.monotonic() >= deadline:
                reason = next(iter(failed[0].failures.values())).reason
                raise RunnerLost(f"one rank of the replica failed and the others wait for it ({reason})")
            said += self._listen(deadline - time.monotonic())
        return said

    def _listen(self, timeout: float) -> list[Any]:
        ready = wait(self.connections, timeout)
        return [
            message
            for number, runner in enumerate(self._runners)
            if runner.connection in ready
            for heard in runner.receive()
            for message in self._hear(number, heard)
        ]

    def stacks(self) -> list[str]:
        """Where every rank is, and which of them have done what the others wait for."""
        outcome = self._outcomes.get(self._begun[0]) if self._begun else None
        done = {} if outcome is None else outcome.parts
        return [
            f"rank {number}, {'done' if number in done else 'not done'} with the batch, {stacks}"
            for number, runner in enumerate(self._runners)
            for stacks in runner.stacks()
        ]

    def stop(self) -> None:
        for runner in self._runners:
            runner.stop()
        self._meeting_place.cleanup()

    def kill(self) -> list[Any]:
        """Ends all processes. What they had said of whole batches and nobody has read is returned."""
        unread = [
            (number, message) for number, runner in enumerate(self._runners) for message in runner.kill()
        ]
        self._meeting_place.cleanup()
        return [message for number, heard in unread for message in self._hear(number, heard)]

    def _hear(self, number: int, message: Any) -> list[Any]:
        """What the message of one rank makes complete; nothing while others still have to speak."""
        if isinstance(message, LoadFailed):
            return [message]
        if isinstance(message, Loaded):
            self._loaded[number] = message
            return [self._describe()] if len(self._loaded) == len(self._runners) else []
        if isinstance(message, Started):
            return self._begin(message) if number == 0 else []
        outcome = self._outcomes.setdefault(message.number, _Outcome())
        if isinstance(message, EncodeFailed):
            outcome.failures[number] = message
        else:
            outcome.parts[number] = message
        if len(outcome.parts) + len(outcome.failures) < len(self._runners):
            return []
        del self._outcomes[message.number]
        self._begun.remove(message.number)
        following = [Started(self._begun[0])] if self._begun else []
        return [_join(message.number, outcome), *following]

    def _begin(self, message: Started) -> list[Any]:
        """The first stage of a pipeline begins a batch while the last one still has the one before: that is suspect."""
        self._begun.append(message.number)
        return [message] if len(self._begun) == 1 else []

    def _describe(self) -> Loaded:
        """The first rank's report, of all devices."""
        first = self._loaded[0]
        names = "+".join(self._loaded[number].report.device.value for number in range(len(self._runners)))
        device = replace(first.report.device, value=names)
        return replace(first, report=replace(first.report, device=device))


def _join(number: int, outcome: _Outcome) -> Encoded | EncodeFailed:
    """What all ranks have said of a batch, as one outcome; it took as long as the slowest of them."""
    if outcome.failures:
        return next(iter(outcome.failures.values()))
    parts = [outcome.parts[rank] for rank in sorted(outcome.parts)]
    vectors = np.concatenate([part.vectors for part in parts])
    return Encoded(number, vectors, max(part.seconds for part in parts), parts[0].memory)
