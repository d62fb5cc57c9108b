"""The doorbell: a worker that runs low rings for the dispatcher, through Redis. Nothing is kept there.

A ring that is lost costs one pause of the dispatcher, so neither side repeats one or waits for the other.
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
# After an error of Redis: whoever rings must not wait for one that hangs at each chunk.
_QUIET_SECONDS: Final = 5.0


def _connect(redis_url: str) -> Redis:
    """Connect with a client that gives up at once: redis-py would try again for seconds."""
    return Redis.from_url(
        redis_url, socket_timeout=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), retries=0)
    )


class Selectable(Protocol):
    """Anything with a file descriptor that is also watched with select()."""

    def fileno(self) -> int: ...


class Doorbell:
    """Rings the bell. Thread-safe; errors of Redis are swallowed."""

    def __init__(self, redis_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = _connect(redis_url)
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


class DoorbellSubscriber:
    """Waits for the bell. Not thread-safe. While Redis is away it only waits out its time."""

    def __init__(self, redis_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = _connect(redis_url)
        self._clock = clock
        self._bell: PubSub | None = None
        self._quiet_until = clock()

    def listen(self) -> None:
        """Subscribe to the bell, unless that is done; call it while Redis is reachable."""
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
        """Wait until the bell rings, the other connection has something to read, or the seconds are over. Return
        whether it rang.
        """
        waited_for: list[Any] = [beside]
        if self._bell is not None:
            connection: Any = self._bell.connection
            waited_for.append(connection._sock)  # as kombu does it: redis-py has no name for it
        ready, _, _ = select.select(waited_for, [], [], seconds)
        return ready not in ([], [beside]) and self._hear_out()

    def _hear_out(self) -> bool:
        """Read all pending rings, so that many of them count as one. Return whether there was any."""
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
