"""RunnerGroup combines the runners of one replica, so that the executor can treat them as one runner.

All ranks get every batch in the same order, and all answer it; the batch's results are theirs in the order of
the ranks. If one dies or fails, the whole group ends: its neighbours wait for it in the middle of a layer, or
have sent data that the next batch would take for its own.

Batches are encoded in the order in which the executor sends them. Every pipe gets the same batches in that
order, a rank's reader passes them on as they come (worker.runner.runner_process), and the rank's only stream
starts them in that order. No rank lets a batch overtake, not even one of known texts, since it cannot know what the
others have started. So an urgent batch overtakes only what was not sent: besides the batches that the ranks
compute, one for each stage, they have the next one, and where they queue short batches, one more. The group
knows nothing about strategies.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryDirectory
from typing import Any, Final

from vectormill.ragged import Ragged
from worker.runner.memory import MemoryReport, join_reports
from worker.runner.messages import (
    Encode,
    Encoded,
    EncodeFailed,
    Load,
    Loaded,
    LoadFailed,
    Reading,
    Started,
)
from worker.runner.runner import Runner, RunnerLost

# A rank whose neighbour dies may raise an error before the death is noticed here, so wait this long for the
# cause.
CAUSE_SECONDS: Final = 5.0


class RunnerGroup:
    """The started processes of a replica and the pipes to them, with the methods of a Runner.

    Not thread-safe.
    """

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
        self._selector = DefaultSelector()
        for number, connection in enumerate(self.connections):
            self._selector.register(connection, EVENT_READ, number)
        self._readings: dict[int, Reading] = {}
        self._loaded: dict[int, Loaded] = {}
        self._parts: dict[int, dict[int, Encoded]] = {}  # the answers of ranks, by batch and rank
        self._failures: list[tuple[int, EncodeFailed]] = []  # rank and failure
        self._memories: dict[int, MemoryReport] = {}  # reports by rank, since the last joint report
        self._begun: deque[int] = deque()  # batches that some rank has started and not all have ended
        self._messages: list[Any] = []  # messages of the group that `receive` has not returned yet

    @property
    def connections(self) -> "list[Connection[Any, Any]]":
        return [runner.connection for runner in self._runners]

    @property
    def pids(self) -> list[int]:
        return [runner.pid for runner in self._runners]

    def send(self, message: Encode) -> None:
        """Send a batch to all ranks, in an order that all keep. Raise RunnerLost if a rank cannot take it."""
        for runner in self._runners:
            runner.send(replace(message, is_urgent=False))

    def receive(self) -> list[Any]:
        """Return the messages of the group as a whole; perhaps none yet.

        Raise RunnerLost if a rank is lost.
        """
        self._collect(0)
        deadline = time.monotonic() + CAUSE_SECONDS
        while self._failures:
            exhausted = [failure for failure in self._failures if failure[1].is_out_of_memory]
            if exhausted or time.monotonic() >= deadline:
                rank, failed = (exhausted or self._failures)[0]
                raise RunnerLost(
                    f"rank {rank} failed on a batch and the others are waiting for it ({failed.reason})",
                    failed=failed,
                )
            self._collect(deadline - time.monotonic())
        messages, self._messages = self._messages, []
        return messages

    def _collect(self, timeout: float) -> None:
        for number in sorted(key.data for key, _ in self._selector.select(timeout)):
            for message in self._runners[number].receive():
                self._messages += self._combine(number, message)

    def stacks(self) -> list[str]:
        """Return where in its code each rank is, and whether it has done the batch that others wait for."""
        done = self._parts.get(self._begun[0], {}) if self._begun else {}
        return [
            f"rank {number}, {'done' if number in done else 'not done'} with the batch, {stacks}"
            for number, runner in enumerate(self._runners)
            for stacks in runner.stacks()
        ]

    def stop(self) -> None:
        self._end(lambda runner: runner.stop())

    def kill(self) -> list[Any]:
        """Kill all processes. Return the unread messages about whole batches."""
        for number, unread in enumerate(self._end(lambda runner: runner.kill())):
            for message in unread:
                self._messages += self._combine(number, message)
        # Return them only once, even if the group is killed again: the executor fails if it gets an outcome
        # twice.
        messages, self._messages = self._messages, []
        return messages

    def _end(self, end: Callable[[Runner], Any]) -> list[Any]:
        """End all processes at once: one that hangs in a driver takes its time beside the others, not before them."""
        self._selector.close()
        with ThreadPoolExecutor(len(self._runners)) as threads:
            ended = list(threads.map(end, self._runners))
        self._meeting_place.cleanup()
        return ended

    def _combine(self, number: int, message: Any) -> list[Any]:
        """Return the group's messages that this rank's message completes; none while other ranks are due."""
        if isinstance(message, LoadFailed):
            return [message]
        if isinstance(message, Reading):
            self._readings[number] = message
            if len(self._readings) < len(self._runners):
                return []
            read, whole = zip(
                *((each.num_bytes_read, each.num_bytes) for each in self._readings.values()), strict=True
            )
            return [Reading(sum(read), sum(whole))]
        if isinstance(message, Loaded):
            self._note_memory(number, message.memory)
            self._loaded[number] = message
            return [self._describe()] if len(self._loaded) == len(self._runners) else []
        if isinstance(message, Started):
            # If a rank dies, all started batches are suspect.
            if message.number in self._begun:
                return []
            self._begun.append(message.number)
            return [message]
        if isinstance(message, EncodeFailed):
            self._failures.append((number, message))
            return []
        self._note_memory(number, message.memory)
        parts = self._parts.setdefault(message.number, {})
        parts[number] = message
        if len(parts) < len(self._runners):
            return []
        del self._parts[message.number]
        self._begun.remove(message.number)
        # Report the others as started again: the time that a forward pass may take begins only now, because they
        # have waited for this one.
        return [self._join(message.number, parts), *map(Started, self._begun)]

    def _describe(self) -> Loaded | LoadFailed:
        """Return the first rank's report for all devices; LoadFailed if ranks have incompatible encoders."""
        first = self._loaded[0]
        reports = [self._loaded[number].report for number in range(len(self._runners))]
        own = reports[0]
        for number, other in enumerate(reports):
            differing = {
                "a different attention": (own.attention, own.is_packed) != (other.attention, other.is_packed),
                "a different queue": own.is_queued != other.is_queued,
                "a different precision": own.precision.value != other.precision.value,
            }
            if any(differing.values()):
                told = " and ".join(name for name, is_so in differing.items() if is_so)
                return LoadFailed(
                    f"Rank {number} was loaded with {told} than rank 0, so they cannot share a model; set the "
                    "worker's precision, attention and switches by name."
                )
        names = "+".join(report.device.value for report in reports)
        device = replace(first.report.device, value=names)
        loadings = tuple(loading for report in reports for loading in report.loadings)
        return Loaded(replace(first.report, device=device, loadings=loadings), self._take_memory())

    def _join(self, number: int, parts: Mapping[int, Encoded]) -> Encoded:
        """Return the ranks' answers to one batch as one.

        Its seconds are those of the slowest rank without its waits for others. Once a pipeline is filled, a batch
        is done whenever so much time has passed, so this is to a group what a batch's time is to a single device.
        """
        results = Ragged.join([parts[rank].results for rank in sorted(parts)])
        seconds = max(part.seconds for part in parts.values())
        collate_seconds = max(part.collate_seconds for part in parts.values())
        return Encoded(number, results, seconds, self._take_memory(), collate_seconds)

    def _note_memory(self, number: int, memory: MemoryReport | None) -> None:
        if memory is not None:
            self._memories[number] = memory

    def _take_memory(self) -> MemoryReport | None:
        """Return a joint report once every rank has sent a new one; until then None.

        Each rank sends one at most four times a second.
        """
        if len(self._memories) < len(self._runners):
            return None
        ranks, self._memories = [self._memories[rank] for rank in sorted(self._memories)], {}
        return join_reports(ranks)
