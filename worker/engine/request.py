"""A request to the engine, its result and its errors, and waiting that can be cancelled."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ChunkError
from vectormill.jobs.item import ItemFailure
from vectormill.ragged import Ragged

CANCEL_POLL_SECONDS: Final = 0.1


class EncodingCancelled(ChunkError):
    """The request was cancelled while it was being encoded."""


class EngineStopped(ChunkError):
    """The engine was stopped before the request was encoded; another worker may take it."""


class RunnerDied(ChunkError):
    """The model process died while it encoded a batch with texts of this request."""

    def __init__(self, message: str | None = None, *, is_suspect: bool = True) -> None:
        super().__init__(message)
        self.is_suspect = is_suspect


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Texts (UTF-8, lone surrogates kept) that are to become vectors of one spec. `request_id` is for logs."""

    request_id: str
    spec: EncodingSpec
    texts: Sequence[bytes]
    interactive: bool
    max_text_chars: int


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """One row per text, in order: float32 [spec.dimensions] of a model that embeds, values of any number and type of
    others. The row of a text in `failures` is zeros, or empty, and its token count 0.

    A text that occurs twice in the request is encoded once; `num_tokens` counts it each time. `num_computed_tokens`
    is all of `num_tokens` and the padding that was computed with them, so that 1 - tokens / computed is the waste.
    `stage_seconds` has the busy time of `tokenize` and `collect`, this request's share of that of `collate` and `run`,
    and what it spent in `wait`, with nobody busy for it. `num_reused` texts (or passages of
    them) have a vector that was computed for an equal one. `num_passages` are those of the texts that were longer than
    one; their tokens are counted in each of them.
    """

    results: Ragged
    failures: Mapping[int, ItemFailure]
    num_tokens: NDArray[np.int32]  # [n]
    num_computed_tokens: int
    truncated: NDArray[np.bool_]  # [n]
    stage_seconds: Mapping[str, float]
    num_reused: int = 0
    num_passages: int = 0

    @property
    def vectors(self) -> NDArray[np.float32]:
        """Return a view [n, spec.dimensions]. Raises ValueError if the results are not vectors."""
        return self.results.matrix


def wait_unless_cancelled(
    event: threading.Event, cancelled: threading.Event, give_up: Callable[[], object]
) -> None:
    """Wait for the event. If the request is cancelled first, call `give_up` and raise EncodingCancelled."""
    while not event.wait(CANCEL_POLL_SECONDS):
        if cancelled.is_set():
            give_up()
            raise EncodingCancelled
