"""The doorbell: a wake-up channel in Redis, by which workers that run low wake the dispatcher.

Nothing is stored. A lost wake-up costs one pause of the dispatcher, so neither side repeats one or waits for
the other.
"""

import select
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from redis import Redis
from redis.backoff import NoBackoff
from redis.client import PubSub
from redis.exceptions import RedisError
from redis.retry import Retry

DOORBELL: Final = "vectormill:doorbell"
# The pause after an error of Redis, so that a worker does not wait for a hanging Redis at each chunk.
_QUIET_SECONDS: Final = 5.0


def connect(redis_url: str) -> Redis:
    """Return a client that fails within a second, where redis-py would retry for seconds."""
    return Redis.from_url(
        redis_url, socket_timeout=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), retries=0)
    )


class Selectable(Protocol):
    """Anything with a file descriptor that is also watched with select()."""

    def fileno(self) -> int: ...


class WakeUpSender:
    """The sending end of the wake-up channel. Thread-safe. Errors of Redis are ignored."""

    def __init__(self, redis_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = connect(redis_url)
        self._clock = clock
        self._quiet_until = clock()

    def ring(self) -> None:
        if self._clock() < self._quiet_until:
            return
        try:
            self._redis.publish(DOORBELL, b"")
        except RedisError:
            self._quiet_until = self._clock() + _QUIET_SECONDS

    def close(self) -> None:
        self._redis.close()


class WakeUpSubscriber:
    """The receiving end of the wake-up channel.

    Not thread-safe. While Redis is away, only time-outs end a wait.
    """

    def __init__(self, redis_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = connect(redis_url)
        self._clock = clock
        self._bell: PubSub | None = None
        self._quiet_until = clock()

    def listen(self) -> None:
        """Subscribe to the channel unless subscribed already; call this while Redis is reachable."""
        if self._bell is not None or self._clock() < self._quiet_until:
            return
        bell: PubSub = self._redis.pubsub()  # type: ignore[no-untyped-call]
        try:
            bell.subscribe(DOORBELL)
            self._bell = bell
        except RedisError:
            bell.close()
            self._quiet_until = self._clock() + _QUIET_SECONDS

    def wait(self, seconds: float, beside: Selectable) -> bool:
        """Wait for a wake-up, for data on the connection `beside`, or for the time-out.

        Return True for a wake-up.
        """
        waited_for: list[Any] = [beside]
        if self._bell is not None:
            connection: Any = self._bell.connection
            waited_for.append(connection._sock)  # as kombu does: redis-py has no public name for it
        ready, _, _ = select.select(waited_for, [], [], seconds)
        return ready not in ([], [beside]) and self._hear_out()

    def _hear_out(self) -> bool:
        """Read all pending wake-ups, so that they count as one. Return whether there was any."""
        assert self._bell is not None
        has_rung = False
        try:
            while self._bell.get_message(timeout=0) is not None:
                has_rung = True
        except (RedisError, OSError):
            self._hang_up()
        return has_rung

    def _hang_up(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
            self._quiet_until = self._clock() + _QUIET_SECONDS

    def close(self) -> None:
        self._hang_up()
        self._redis.close()
