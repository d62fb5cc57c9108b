"""Canary: a text whose answer is known since its process was loaded, and by which the process shows that it is sound.

After a batch failed, nobody knows whether a text was to blame or the process is sick: after an exhaustion openvino
fails with every batch or takes one's shapes for another's, and oneDNN makes no kernel any more. So nothing is believed,
of the failure and of what comes behind it, before every stream has encoded the canary again. Knows no runner.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.engine.work import OwnedBatch
from worker.runner.messages import Encoded

# A process that can make no new kernel still has those for shapes that it has seen, so that each batch is of another
# shape: one row more. By then there are too many shapes for a library to keep them all.
MOST_ROWS: Final = 64
# Canaries beyond those of the streams, from a process behind a sick one.
NUM_MORE: Final = 4


@dataclass(frozen=True, slots=True)
class Canary:
    """A batch of one row, and a function that finds what is wrong with its answers.

    `find_flaw(results, expected)` compares rows with the values that a canary was answered with before. The task knows
    which differences matter.
    """

    batch: Batch
    find_flaw: Callable[[Ragged, NDArray[Any]], str]


@dataclass(frozen=True, slots=True)
class FailedSequence:
    """A work of one sequence that failed, and the item error that it would be."""

    work: OwnedBatch
    code: str
    reason: str


@dataclass(slots=True)
class CanaryCheck:
    """The canaries of one process, and the outcomes that are withheld until every stream has answered.

    `flaw` says what was wrong with an answer, and nothing of this process is to be believed any more then.
    """

    canary: Canary
    num_due: int = 0  # batches that are still to be sent
    numbers: set[int] = field(default_factory=set)  # of those that are with the process
    flaw: str = ""
    failed: list[FailedSequence] = field(default_factory=list)
    withheld: list[tuple[OwnedBatch, Encoded]] = field(default_factory=list)  # came of a process in doubt
    _expected: NDArray[Any] | None = None
    _num_rows: int = 0

    @property
    def is_open(self) -> bool:
        """Return True until every stream has answered correctly. A flaw keeps it open until the process is gone."""
        return bool(self.num_due or self.numbers or self.flaw)

    def begin(self, num_streams: int, *, is_in_doubt: bool) -> None:
        """Start the check of a newly loaded process. Its first answer is what the others are compared with. After a
        sick process more canaries are sent, so that a text is not blamed for what happens without it.
        """
        self._expected, self._num_rows, self.flaw = None, 0, ""
        self.numbers.clear()
        self.num_due = 1 + num_streams + NUM_MORE * is_in_doubt

    def doubt(self, num_streams: int) -> None:
        """Start a check after a failed batch. Canaries already on their way may have been encoded before it."""
        self.num_due = num_streams

    def next_batch(self, number: int) -> Batch:
        self.num_due -= 1
        self.numbers.add(number)
        self._num_rows = self._num_rows % MOST_ROWS + 1
        return self.canary.batch.take(np.zeros(self._num_rows, dtype=np.int64))

    def hear(self, number: int, results: Ragged) -> None:
        self.numbers.discard(number)  # of one text, as often as the batch has it
        if self._expected is None:
            self._expected = results.row(0).copy()
        self.flaw = self.flaw or self.canary.find_flaw(results, self._expected)

    def hear_failure(self, number: int, reason: str) -> None:
        self.numbers.discard(number)
        self.flaw = self.flaw or reason

    def end(self) -> None:
        """End without a verdict, because the process is gone."""
        self.num_due, self.flaw = 0, ""
        self.numbers.clear()


def find_misfit(results: Ragged, dimension: int | None) -> str:
    """Return why rows that should be vectors of this dimension are not; empty if they are, or no dimension is given."""
    if dimension is None:
        return ""
    if results.values.dtype != np.float32:
        return f"its results are of {results.values.dtype}, not vectors of float32"
    lengths = results.lengths
    if (lengths == dimension).all():
        return ""
    other = int(lengths[lengths != dimension][0])
    return (
        f"its results have {other} values, and vectors of this model have {dimension}; an encoder of other results "
        "says so in its report (gives_vectors)"
    )
