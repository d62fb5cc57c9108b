"""QueryConsumer: the worker's end of the query queue. Knows no engine."""

import time
from typing import Final, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from vectormill.broker.query_messages import (
    DEAD_SECONDS,
    Answer,
    Query,
    bell_key,
    listeners_key,
    pulse_key,
    queue_key,
    read_query,
    write_message,
    write_pulse,
)

# Idle threads ask again so seldom; Redis answers a waiting one at once.
TAKE_SECONDS: Final = 5.0
# Answers that an API which has gone does not read.
ANSWERS_SECONDS: Final = 30.0


class QueryConsumer:
    """Takes queries and sends answers. Thread-safe. Every method but `close` raises redis.exceptions.RedisError while
    Redis is away.
    """

    def __init__(self, redis_url: str, space: str, worker: str) -> None:
        self._queue, self._listeners, self._pulse = queue_key(space), listeners_key(space), pulse_key(worker)
        self._bell = bell_key(worker)
        # A command that is repeated blindly may be carried out twice; whoever calls tries again.
        self._redis = Redis.from_url(
            redis_url, socket_timeout=2 * TAKE_SECONDS, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
        )
        self._clock_offset = 0.0

    def beat(self, in_hand: set[bytes]) -> None:
        """Say that this worker lives and take queries, which of them it has, and ask for the time."""
        milliseconds = int(DEAD_SECONDS * 1000)
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.set(self._pulse, write_pulse(in_hand), px=milliseconds)
            pipeline.set(self._listeners, b"", px=milliseconds)
            pipeline.time()
            seconds, microseconds = pipeline.execute()[-1]
        self._clock_offset = seconds + microseconds / 1e6 - time.monotonic()

    def take(self) -> Query | None:
        """Return the oldest query; None when none came for a while. Raise UnreadableMessage."""
        found = self._redis.blpop([self._bell, self._queue], timeout=TAKE_SECONDS)
        if found is None or found[0] == self._bell.encode():
            return None
        return read_query(cast(bytes, found[1]))

    def wake(self, num_threads: int) -> None:
        """Has so many threads that wait in `take` return at once."""
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.rpush(self._bell, *[b""] * num_threads)
            pipeline.pexpire(self._bell, int(TAKE_SECONDS * 1000))
            pipeline.execute()

    def is_expired(self, query: Query) -> bool:
        """Return whether nobody waits for the query any more."""
        return (time.monotonic() + self._clock_offset) * 1000 >= query.expires_at

    def answer(self, query: Query, answer: Answer) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.rpush(query.answers, write_message(answer))
            pipeline.pexpire(query.answers, int(ANSWERS_SECONDS * 1000))
            pipeline.execute()

    def leave(self) -> None:
        """Say that this worker has nothing in hand any more."""
        self._redis.delete(self._pulse, self._bell)

    def close(self) -> None:
        """Close the connections. Call it while no thread is in any other method."""
        self._redis.close()
