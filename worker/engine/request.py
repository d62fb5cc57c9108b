"""A request to the engine, its result and its errors, and a wait that can be cancelled."""

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
    """The model process died while encoding a batch with texts of this request."""

    def __init__(self, message: str | None = None, *, is_suspect: bool = True) -> None:
        super().__init__(message)
        self.is_suspect = is_suspect


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Texts (UTF-8, lone surrogates kept) to be encoded as one spec says. `request_id` is for logs."""

    request_id: str
    spec: EncodingSpec
    texts: Sequence[bytes]
    interactive: bool
    max_text_chars: int


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """The results of a request, one row per text, in order.

    A row is float32 [spec.dimensions] for a model that embeds; other models return any number of values of
    any type. For a text in `failures` the row is zeros, or empty if results are not vectors, and the token
    count is 0.

    A text that occurs twice in the request is encoded once; `num_tokens` counts it each time.
    `num_computed_tokens` is the sum of `num_tokens` and of the padding that was computed, so that 1 - tokens
    / computed is the waste. `stage_seconds` has the busy time of `tokenize` and `collect`, this request's
    share of that of `collate` and `run`, and in `wait` the time in which nothing worked on it. `num_reused`
    counts texts (or passages of them) whose vector was taken from an equal one. `num_passages` counts the
    passages of texts that were longer than the model reads; `num_tokens` counts a token in each of its
    passages.
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
        """Return a view [n, spec.dimensions]. Raise ValueError if the results are not vectors."""
        return self.results.matrix


def wait_unless_cancelled(
    event: threading.Event, cancelled: threading.Event, give_up: Callable[[], object]
) -> None:
    """Wait for the event. If the request is cancelled first, call `give_up` and raise EncodingCancelled."""
    while not event.wait(CANCEL_POLL_SECONDS):
        if cancelled.is_set():
            give_up()
            raise EncodingCancelled
