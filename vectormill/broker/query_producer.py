"""QueryProducer: the API's end of the query queue. Knows no HTTP.

It repeats nothing: the caller decides what a loss means.
"""

import secrets
from collections.abc import Iterable
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from vectormill.broker.query_messages import (
    Answer,
    UnreadableMessage,
    answers_key,
    listeners_key,
    pulse_key,
    queue_key,
    read_answer,
    read_pulse,
)

HEAR_SECONDS: Final = 5.0
# A list of queries that nobody takes goes when the last of them has expired.
POST: Final = """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""


class QueryProducer:
    """Posts queries and receives answers, on one event loop. Every method but `close` raises
    redis.exceptions.RedisError while Redis is away.
    """

    def __init__(self, redis_url: str) -> None:
        self.address = answers_key(secrets.token_hex(8))
        self._redis = Redis.from_url(
            redis_url, socket_timeout=2 * HEAR_SECONDS, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0)
        )
        self._post = self._redis.register_script(POST)

    async def ask_time(self) -> float:
        """Return seconds on Redis's clock, by which queries expire."""
        seconds, microseconds = await self._redis.time()
        return float(seconds) + float(microseconds) / 1e6

    async def post(self, space: str, message: bytes, seconds: float) -> bool:
        """Put a query where workers of the space take it. False, and nothing is posted, while none does."""
        keys = [queue_key(space), listeners_key(space)]
        return bool(await self._post(keys=keys, args=[message, int(seconds * 1000)]))

    async def hear(self) -> Answer | None:
        """Return the next answer; None when none came for a while. Raise UnreadableMessage."""
        found = await cast(Any, self._redis.blpop([self.address], timeout=HEAR_SECONDS))
        return None if found is None else read_answer(found[1])

    async def look_at_workers(self, workers: Iterable[str]) -> dict[str, set[bytes]]:
        """Return the ids of the queries that each has in hand; who is dead has none."""
        names = list(workers)
        pulses = await cast(Any, self._redis.mget([pulse_key(name) for name in names])) if names else []
        found: dict[str, set[bytes]] = {}
        for name, pulse in zip(names, pulses, strict=True):
            try:
                found[name] = set() if pulse is None else read_pulse(pulse)
            except UnreadableMessage:
                found[name] = set()
        return found

    async def waits(self, space: str, message: bytes) -> bool:
        """Return whether no worker has taken the query yet and a live one still may; otherwise take it back."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.exists(listeners_key(space))
            pipeline.lpos(queue_key(space), cast(Any, message))
            is_listened_to, place = await pipeline.execute()
        if place is not None and not is_listened_to:
            await cast(Any, self._redis.lrem(queue_key(space), 1, cast(Any, message)))
            return False
        return place is not None

    async def close(self) -> None:
        await self._redis.aclose()
