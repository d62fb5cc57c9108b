"""Retries: how long to wait before a request is made again, and when to give up. Waits for nothing itself."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vectormill.problems import ApiError, ApiUnreachable

# The sum of all pauses of one call: longer than `vectormill up` needs to restart its API.
DEFAULT_SECONDS: Final = 6.0
FIRST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 30.0
# The share of a pause that is added at random: clients that were refused together do not come back together.
JITTER_SHARE: Final = 0.25
RETRIED_STATUS: Final = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Retries:
    """`most_seconds` bounds all pauses of a call together; `chance` gives 0 to 1."""

    most_seconds: float = DEFAULT_SECONDS
    chance: Callable[[], float] = random.random

    def begin(self) -> "Pauses":
        """Return the pauses of one call, or of one stretch without progress."""
        return Pauses(self)


class Pauses:
    """Each twice as long as the one before, and none shorter than the server asked for in `Retry-After`."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._next = FIRST_SECONDS
        self._left = retries.most_seconds

    def before_next(self, error: ApiError | ApiUnreachable) -> float | None:
        """Return seconds to wait before the call is made again; None when it is not worth it, or the time is over."""
        if isinstance(error, ApiError) and error.status not in RETRIED_STATUS:
            return None
        asked = (error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0
        if self._left <= 0 or asked > self._left:
            return None
        pause = max(self._next, asked) * (1 + JITTER_SHARE * self._retries.chance())
        pause = min(pause, self._left)
        self._left -= pause
        self._next = min(2 * self._next, LONGEST_SECONDS)
        return pause
