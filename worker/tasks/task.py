"""The interface between a task and the engine. It knows nothing about batches or models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class RequestState(Protocol):
    """The state of one request: its sequences go to the model and results come back, in one or more rounds.

    Its methods are called by the request's own thread and may be slow: no device waits for them.
    """

    @property
    def constants(self) -> Mapping[str, int]:
        """Return the inputs that have one value for all sequences, by name; 0 is the default of each."""

    def start(self) -> TokenizedTexts:
        """Return the first sequences.

        A sequence without tokens is not encoded; `failures` holds the reason.
        """

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> TokenizedTexts | None:
        """Take one row of results for each of the last sequences, and the failures among them.

        Return the next sequences to encode; None if there are none.
        """

    def finish(self) -> Finished:
        """Return the results, once no sequence is left to encode."""


class WorkerTask(Protocol):
    """A task of one model. May be used by several threads."""

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> RequestState:
        """Begin a request of n distinct items.

        `texts` are UTF-8 as stored: lone surrogates are kept and the two texts of a pair are joined.
        """

    def canary(self, text: str) -> Mapping[str, Ragged]:
        """Return the inputs of one sequence of this text; its result shows that a model process computes."""

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        """Return what is wrong with the model's results for canaries; empty if nothing is.

        `expected` is the result of a canary that was encoded before. If a model has several tasks, any of
        them can be asked.
        """
