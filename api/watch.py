"""Watch: a value that several clients follow is read once for all of them."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fastapi.concurrency import run_in_threadpool

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class Watched(Generic[Value]):
    """Something that clients follow, as it was last read.

    The lock lets clients that come during a read share it.
    """

    num_followers: int = 0
    value: Value | None = None
    read_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Watch(Generic[Key, Value]):
    """Values that clients follow, by key; each is read again when it is older than `seconds`.

    Only the event loop may use a watch.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._followed: dict[Key, Watched[Value]] = {}

    @contextmanager
    def join(self, key: Key) -> Iterator[Watched[Value]]:
        """Count one more follower for the duration of the block; nothing is kept after the last one."""
        followed = self._followed.setdefault(key, Watched())
        followed.num_followers += 1
        try:
            yield followed
        finally:
            followed.num_followers -= 1
            if not followed.num_followers:
                del self._followed[key]

    async def look(self, followed: Watched[Value], read: Callable[[], Value]) -> Value:
        """Return the value as it was less than `seconds` ago; `read` is called in a thread if that is too old."""
        async with followed.lock:
            if followed.value is None or self._clock() - followed.read_at >= self.seconds:
                followed.value = await run_in_threadpool(read)
                followed.read_at = self._clock()
            return followed.value
