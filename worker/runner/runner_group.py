"""RunnerGroup: the runners of one replica, which its executor treats as one. Knows no strategy.

All are given every batch, in one order, and all answer it: their results one behind the other, in the order of the
ranks, are the batch's. One that dies or fails ends the group: its neighbours wait for it in the middle of a layer, or
have sent what the next batch would take for its own.

The order is that in which the executor sends. Every pipe gets the same batches one behind the other, a rank's reader
hands them on as they come (worker.runner.runner_process), and its one stream starts them so. No rank lets one overtake,
not even a canary, since it cannot know what the others have started. An urgent batch overtakes what was not sent:
beside the batch that they compute, ranks have the next one, and where they queue short batches, one more.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryDirectory
from typing import Any, Final

from vectormill.ragged import Ragged
from worker.encoder.encoder import EncoderReport
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

# A rank whose neighbour dies may hear of that before we do, as an error of its own: the cause is waited for.
CAUSE_SECONDS: Final = 5.0


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
        self._selector = DefaultSelector()
        for number, connection in enumerate(self.connections):
            self._selector.register(connection, EVENT_READ, number)
        self._readings: dict[int, Reading] = {}
        self._loaded: dict[int, Loaded] = {}
        self._parts: dict[int, dict[int, Encoded]] = {}  # what ranks have answered, by batch and rank
        self._failures: list[tuple[int, EncodeFailed]] = []  # with the rank
        self._memories: dict[int, MemoryReport] = {}  # of ranks, since all of them were last reported
        self._begun: deque[int] = deque()  # by any rank, and not yet ended by all
        self._said: list[Any] = []  # by the group, and not yet returned

    @property
    def connections(self) -> "list[Connection[Any, Any]]":
        return [runner.connection for runner in self._runners]

    @property
    def pid(self) -> int:
        """Return the process of the first rank."""
        return self._runners[0].pid

    def send(self, message: Encode) -> None:
        """Send a batch to all ranks, of which none lets it overtake. Raises RunnerLost."""
        for runner in self._runners:
            runner.send(replace(message, is_urgent=False))

    def receive(self) -> list[Any]:
        """Return what the group as a whole reports; perhaps nothing yet. Raises RunnerLost."""
        self._listen(0)
        deadline = time.monotonic() + CAUSE_SECONDS
        while self._failures:
            exhausted = [failure for failure in self._failures if failure[1].is_out_of_memory]
            if exhausted or time.monotonic() >= deadline:
                rank, failed = (exhausted or self._failures)[0]
                raise RunnerLost(
                    f"rank {rank} failed with a batch and the others wait for it ({failed.reason})",
                    failed=failed,
                )
            self._listen(deadline - time.monotonic())
        said, self._said = self._said, []
        return said

    def _listen(self, timeout: float) -> None:
        for number in sorted(key.data for key, _ in self._selector.select(timeout)):
            for message in self._runners[number].receive():
                self._said += self._hear(number, message)

    def stacks(self) -> list[str]:
        """Return where every rank is, and which of them have done what the others wait for."""
        done = self._parts.get(self._begun[0], {}) if self._begun else {}
        return [
            f"rank {number}, {'done' if number in done else 'not done'} with the batch, {stacks}"
            for number, runner in enumerate(self._runners)
            for stacks in runner.stacks()
        ]

    def stop(self) -> None:
        self._selector.close()
        for runner in self._runners:
            runner.stop()
        self._meeting_place.cleanup()

    def kill(self) -> list[Any]:
        """Kill all processes. Return unread messages about whole batches."""
        self._selector.close()
        unread = [
            (number, message) for number, runner in enumerate(self._runners) for message in runner.kill()
        ]
        self._meeting_place.cleanup()
        for number, message in unread:
            self._said += self._hear(number, message)
        # Once, also when it is killed again: an executor that heard an outcome twice would end.
        said, self._said = self._said, []
        return said

    def _hear(self, number: int, message: Any) -> list[Any]:
        """Return the messages that one rank's message completes; none while others have yet to answer."""
        if isinstance(message, LoadFailed):
            return [message]
        if isinstance(message, Reading):
            self._readings[number] = message
            return [self._sum_readings()] if len(self._readings) == len(self._runners) else []
        if isinstance(message, Loaded):
            self._note_memory(number, message.memory)
            self._loaded[number] = message
            return [self._describe()] if len(self._loaded) == len(self._runners) else []
        if isinstance(message, Started):
            return self._begin(message)
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
        # Said again, of what has waited for this one: the time that a pass may take begins when it is computed.
        following = [Started(self._begun[0])] if self._begun else []
        return [self._join(message.number, parts), *following]

    def _begin(self, message: Started) -> list[Any]:
        """Note that a rank has started a batch. If a rank dies, all started ones are suspect."""
        if message.number in self._begun:
            return []
        self._begun.append(message.number)
        return [message]

    def _sum_readings(self) -> Reading:
        readings = self._readings.values()
        return Reading(
            sum(each.num_bytes_read for each in readings), sum(each.num_bytes for each in readings)
        )

    def _describe(self) -> Loaded | LoadFailed:
        """Return the first rank's report for all devices; LoadFailed if ranks differ in what they must share."""
        first = self._loaded[0]
        reports = [self._loaded[number].report for number in range(len(self._runners))]
        for number, report in enumerate(reports):
            if differing := find_differing(reports[0], report):
                return LoadFailed(
                    f"Rank {number} was loaded with {differing} than rank 0, and they cannot share a model; set the "
                    "worker's precision, attention and switches by name."
                )
        names = "+".join(report.device.value for report in reports)
        device = replace(first.report.device, value=names)
        loadings = tuple(loading for report in reports for loading in report.loadings)
        return Loaded(replace(first.report, device=device, loadings=loadings), self._take_memory())

    def _join(self, number: int, parts: Mapping[int, Encoded]) -> Encoded:
        """Join the ranks' answers to one batch. It took as long as the slowest."""
        results = Ragged.join([parts[rank].results for rank in sorted(parts)])
        seconds = max(part.seconds for part in parts.values())
        collate_seconds = max(part.collate_seconds for part in parts.values())
        return Encoded(number, results, seconds, self._take_memory(), collate_seconds)

    def _note_memory(self, number: int, memory: MemoryReport | None) -> None:
        if memory is not None:
            self._memories[number] = memory

    def _take_memory(self) -> MemoryReport | None:
        """Return a joint report once every rank has reported anew, which each does at most four times a second."""
        if len(self._memories) < len(self._runners):
            return None
        ranks, self._memories = [self._memories[rank] for rank in sorted(self._memories)], {}
        return join_reports(ranks)


def find_differing(report: EncoderReport, other: EncoderReport) -> str:
    """Return what two ranks must share and do not, in words; empty if nothing."""
    differing = {
        "another attention": report.attention != other.attention or report.is_packed != other.is_packed,
        "another queue": report.is_queued != other.is_queued,
        "another precision": report.precision.value != other.precision.value,
    }
    return " and ".join(name for name, is_so in differing.items() if is_so)
