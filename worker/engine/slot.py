"""Slot: a place in the engine for one request, and waiting that a cancelled request ends. Knows no engine."""

import threading
from collections.abc import Callable
from typing import Final

from worker.engine.request import EncodingCancelled, EngineStopped

CANCEL_POLL_SECONDS: Final = 0.1
# Beside those of interactive chunks: for queries, which come by messages with many texts each.
QUERY_PLACES: Final = 3


class Slot:
    """Entered when a place is free; waiting ends too when the request is cancelled or the engine stops."""

    def __init__(
        self,
        places: threading.BoundedSemaphore,
        cancelled: threading.Event,
        is_running: Callable[[], bool],
    ) -> None:
        self._places = places
        self._cancelled = cancelled
        self._is_running = is_running

    def __enter__(self) -> None:
        """Raises EncodingCancelled and EngineStopped."""
        while not self._places.acquire(timeout=CANCEL_POLL_SECONDS):
            if self._cancelled.is_set():
                raise EncodingCancelled
            if not self._is_running():
                raise EngineStopped

    def __exit__(self, *exception: object) -> None:
        self._places.release()


def wait_unless_cancelled(
    event: threading.Event, cancelled: threading.Event, give_up: Callable[[], object]
) -> None:
    """Waits for the event. When the request is cancelled first: gives up and raises EncodingCancelled."""
    while not event.wait(CANCEL_POLL_SECONDS):
        if cancelled.is_set():
            give_up()
            raise EncodingCancelled
