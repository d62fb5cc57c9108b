"""The interface between a task and the engine. It knows nothing about batches or models."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import ItemFailure
from vectormill.ragged import Ragged
from worker.tokens.tokenized import TokenizedTexts


@dataclass(frozen=True, slots=True)
class Finished:
    """The results of a request, with one row per item in order. A failed item's row may hold anything.

    `num_tokens`, `truncated` and `num_passages` are 0 or False where an item failed.
    """

    results: Ragged
    failures: Mapping[int, ItemFailure]
    num_tokens: NDArray[np.int32]  # [n]
    truncated: NDArray[np.bool_]  # [n]
    num_passages: NDArray[np.int32]  # [n]

    @classmethod
    def of(
        cls,
        results: Ragged,
        failures: Mapping[int, ItemFailure],
        num_tokens: "NDArray[Any]",
        truncated: NDArray[np.bool_],
        num_passages: NDArray[np.int32] | None = None,
    ) -> Self:
        """Return the results with the counts of failed items set to 0. Without passages, all are whole."""
        failed = list(failures)
        lengths, is_cut = num_tokens.astype(np.int32), truncated.copy()
        counts = np.zeros(len(lengths), np.int32) if num_passages is None else num_passages.copy()
        lengths[failed], is_cut[failed], counts[failed] = 0, False, 0
        return cls(results, failures, lengths, is_cut, counts)


# The sequences to encode next, and the inputs that have one value for all of them, by name; 0 is the default of each.
# A sequence without tokens is not encoded; `failures` holds the reason.
Asked = tuple[TokenizedTexts, Mapping[str, int]]
# A row of results for each of the last sequences, and the failures among them.
Answered = tuple[Ragged, Mapping[int, ItemFailure]]
# A request in one or more rounds: it yields sequences, is sent their results, and returns those of its items.
Rounds = Generator[Asked, Answered, Finished]


def advance(rounds: Rounds, answered: Answered | None) -> Asked | Finished:
    """Return what the request asks for next, or its results. Nothing has been answered when it begins."""
    try:
        return next(rounds) if answered is None else rounds.send(answered)
    except StopIteration as end:
        finished: Finished = end.value
        return finished


class WorkerTask(Protocol):
    """A task of one model. May be used by several threads.

    `asks_again` says that a request may have further rounds, whose sequences follow from results of earlier ones.
    """

    asks_again: bool

    def process(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> Rounds:
        """Process a request of n distinct items in the request's own thread. It may be slow: no device waits for it.

        `texts` are UTF-8 as stored: lone surrogates are kept and the two texts of a pair are joined.
        """

    def make_known_inputs(self, text: str) -> Mapping[str, Ragged]:
        """Return the inputs of one sequence of this text; its result shows that a model process computes."""

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        """Return what is wrong with the model's results for a known text; empty if nothing is.

        `expected` is the result of the same text that was encoded before. If a model has several tasks, any of
        them can be asked.
        """
