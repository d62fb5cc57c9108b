"""Places: how many requests are in the engine at once, and waiting that a cancelled one ends. Knows no engine."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from vectormill.jobs.chunks.chunk_size import LARGEST_CHUNK_TOKENS
from worker.engine.request import EncodingCancelled, EngineStopped

CANCEL_POLL_SECONDS: Final = 0.1
# Beside those of interactive chunks: for queries, which come by messages with many texts each.
QUERY_PLACES: Final = 3
# Full batches of a device that are kept in flight for each that it works at: four that it computes or finds waiting,
# and as many in chunks that are dispatched, claimed, tokenized and committed meanwhile.
BATCHES_IN_FLIGHT: Final = 8
# Where padding is computed, batches are full only if there are so many to choose like lengths from: of paragraphs with
# 8,192 tokens in a batch they are full by 0.27 with 16 batches in flight, by 0.44 with 32.
PADDED_BATCHES_IN_FLIGHT: Final = 32
# However small batches are: one chunk that is encoded, one that is committed and one that comes.
LEAST_TOKENS_IN_FLIGHT: Final = 3 * LARGEST_CHUNK_TOKENS

_MOST_TOKENS_IN_FLIGHT: Final = (1 << 31) - 1  # an integer of Postgres


def choose_tokens_in_flight(batch_tokens: int, num_started: int, *, pads: bool) -> int:
    """Return how many tokens a worker wants dispatched, given the batches its device works at and their size."""
    num_batches = PADDED_BATCHES_IN_FLIGHT if pads else BATCHES_IN_FLIGHT
    wanted = max(num_batches * num_started * batch_tokens, LEAST_TOKENS_IN_FLIGHT)
    return min(wanted, _MOST_TOKENS_IN_FLIGHT)


class Places:
    """A limit on concurrent requests and their tokens. Thread-safe.

    The last request may exceed the limit of tokens, so that one of any size comes in.
    """

    def __init__(self, num_requests: int, max_tokens: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._max_tokens = max_tokens
        self._changed = threading.Condition()
        self._num_tokens = 0
        self.num_free = num_requests

    def acquire(self, num_tokens: int, timeout: float) -> bool:
        """Take a place. Return False if there was none within so many seconds."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout):
                return False
            self.num_free -= 1
            self._num_tokens += num_tokens
            return True

    def release(self, num_tokens: int) -> None:
        with self._changed:
            self.num_free += 1
            self._num_tokens -= num_tokens
            self._changed.notify_all()

    @contextmanager
    def hold(
        self, num_tokens: int, cancelled: threading.Event, is_running: Callable[[], bool]
    ) -> Iterator[None]:
        """Hold a place while the block runs. Raises EncodingCancelled or EngineStopped while waiting for one."""
        while not self.acquire(num_tokens, CANCEL_POLL_SECONDS):
            if cancelled.is_set():
                raise EncodingCancelled
            if not is_running():
                raise EngineStopped
        try:
            yield
        finally:
            self.release(num_tokens)

    def _has_room(self) -> bool:
        return self.num_free > 0 and self._num_tokens < self._max_tokens()


def wait_unless_cancelled(
    event: threading.Event, cancelled: threading.Event, give_up: Callable[[], object]
) -> None:
    """Wait for the event. If the request is cancelled first, call `give_up` and raise EncodingCancelled."""
    while not event.wait(CANCEL_POLL_SECONDS):
        if cancelled.is_set():
            give_up()
            raise EncodingCancelled
