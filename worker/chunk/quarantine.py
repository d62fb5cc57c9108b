"""Quarantine: a chunk in whose company a process died is encoded alone, so that the next end tells whose fault it is.

Batches mix texts of several chunks, and a crash ends them all. Knows nothing of chunks or engines.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from worker.engine.request import CANCEL_POLL_SECONDS, EncodingCancelled


class Quarantine:
    """Thread-safe. Others go in together; a suspect goes in when all have left, and nobody passes it at the door."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False  # a suspect is inside, or waits

    @contextmanager
    def enter(self, cancelled: threading.Event, *, is_suspect: bool) -> Iterator[None]:
        """Hold a place, alone for a suspect. Raises EncodingCancelled if the event is set meanwhile."""
        with self._changed:
            self._wait_until_open(cancelled)
            self._is_closed = is_suspect
            try:
                while is_suspect and self._num_inside:
                    self._pause(cancelled)
            except EncodingCancelled:
                self._open()
                raise
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                if is_suspect:
                    self._open()
                self._changed.notify_all()

    def _wait_until_open(self, cancelled: threading.Event) -> None:
        while self._is_closed:
            self._pause(cancelled)

    def _pause(self, cancelled: threading.Event) -> None:
        self._changed.wait(CANCEL_POLL_SECONDS)
        if cancelled.is_set():
            raise EncodingCancelled

    def _open(self) -> None:
        self._is_closed = False
        self._changed.notify_all()
