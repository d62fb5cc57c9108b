"""Deadline: the time until which one request is worked on."""

import time


class Deadline:
    """The end of a request, `seconds` after it came, or when its client has gone.

    Every step of a search asks for the time that is left, so that no loop goes on after it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Return the seconds that are left, 0 after the end."""
        return max(self._ends_at - time.monotonic(), 0.0)

    def end(self) -> None:
        """End the request now, because nobody waits for its answer."""
        self._ends_at = 0.0
