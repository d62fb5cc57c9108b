"""Work: what an executor is given and what it tells of it: its two neighbours in the engine. Knows no runner."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.batching.sequences import Sequences
from worker.runner.memory import MemoryReport


@dataclass(frozen=True, slots=True)
class Work:
    """A batch, and whose sequences it is made of."""

    sequences: Sequences
    batch: Batch
    is_urgent: bool = False
    is_suspect: bool = False  # it was being encoded, and others beside it, when a runner died or fell sick
    num_failures: int = 0  # of a single sequence, in runners that were sound
    num_sickened: int = 0  # runners that were sound before it and, with nothing else at work, sick behind it

    @property
    def is_tried_alone(self) -> bool:
        return self.is_suspect or self.num_failures > 0

    @property
    def length(self) -> int:
        """As how long all are computed by a kernel that pads, in tokens."""
        return self.sequences.max_length

    def halves(self) -> tuple["Work", "Work"]:
        middle = len(self.sequences) // 2
        return (
            Work(self.sequences.part(0, middle), self.batch.part(0, middle), self.is_urgent),
            Work(
                self.sequences.part(middle, len(self.sequences)),
                self.batch.part(middle, len(self.sequences)),
                self.is_urgent,
            ),
        )


class WorkSource(Protocol):
    """Where work comes from and where its outcome goes. Called from the executor's thread.

    `next_work` may hold a batch back, hoping for more to fill it; `ask_again_at`, a moment of time.monotonic, is when
    it will not any more. None: ask when something is added or an outcome has come.
    """

    def next_work(self, *, is_runner_idle: bool) -> Work | None: ...
    def next_urgent_work(self) -> Work | None: ...
    def ask_again_at(self) -> float | None: ...
    def deliver(self, work: Work, results: Ragged, seconds: float, collate_seconds: float) -> None: ...
    def fail_work(self, work: Work, code: str, reason: str) -> None: ...
    def lose_work(self, work: Work, reason: str) -> None: ...
    def take_back(self, works: Iterable[Work]) -> None: ...
    def close(self, reason: str) -> None: ...


class WorkObserver(Protocol):
    """Hears what batches cost. Called from the executor's thread, between batches."""

    def observe_encoded(self, work: Work, seconds: float, memory: MemoryReport | None) -> None: ...
    def observe_out_of_memory(self, work: Work, reason: str) -> None: ...
    def observe_killed(self, work: Work) -> None: ...
