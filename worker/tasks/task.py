"""The contract between a task and the engine. Knows neither batches nor models."""

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
    """The results of a request, a row for each item in order. A failed item's row may be anything.

    `num_tokens`, `truncated` and `num_passages` are 0 or false where an item failed.
    """

    results: Ragged
    failures: Mapping[int, ItemFailure]
    num_tokens: NDArray[np.int32]  # [n]
    truncated: NDArray[np.bool_]  # [n]
    num_passages: NDArray[np.int32]  # [n]


class RequestState(Protocol):
    """The state of one request: its sequences go to the model and answers come back, perhaps several times.

    Called by the thread of one request, which may take its time: no device waits for it.
    """

    @property
    def prompt_length(self) -> int:
        """Return the number of leading tokens in each sequence that are not pooled."""

    def start(self) -> TokenizedTexts:
        """Return the first sequences. Those of no tokens are not encoded; `failures` say why."""

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> TokenizedTexts | None:
        """Take the answers to the last sequences, a row each, and which of them failed. Return the next sequences to
        encode; None when there are none.
        """

    def finish(self) -> Finished:
        """Return the finished results, once nothing is left to encode."""


class WorkerTask(Protocol):
    """A task for one model. Shared by threads."""

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> RequestState:
        """Begin with `texts`: n different items as they are stored (UTF-8, lone surrogates kept; pairs are joined)."""

    def canary(self, text: str) -> Mapping[str, Ragged]:
        """Return the inputs of one sequence of this text, by which a model process shows that it still computes."""

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        """Return what is wrong with the model's answers to canaries, of which one was answered with `expected` before;
        empty if nothing is. Asked of a task whose model answers the same for all of its tasks.
        """
