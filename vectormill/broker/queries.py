"""The query queue in Redis: messages, keys, the API's QueryProducer and the worker's QueryConsumer.

Only these messages contain texts: a query is not durable, and is worthless once its client has gone
(docs/decisions/0023). Each message is a version byte followed by MessagePack. New fields go to the end of a
list, where an earlier release ignores them.
"""

import hashlib
import secrets
import time
from collections.abc import Iterable
from typing import Any, Final, TypeVar, cast

import msgspec
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from vectormill.domain.encoding import EncodingSpec

VERSION: Final = b"\x01"
PREFIX: Final = "vectormill:queries:"
# A worker sends a heartbeat with the ids of its queries at this interval, and counts as dead DEAD_SECONDS after
# the last one.
PULSE_SECONDS: Final = 0.2
DEAD_SECONDS: Final = 0.6


class Query(msgspec.Struct, frozen=True, array_like=True):
    """Texts (UTF-8, lone surrogates kept) to be encoded as vectors of one spec.

    `answers` is the key of the list for the answers. `expires_at` is the time, in milliseconds on Redis's
    clock, from which no client waits any more. `traceparents` are the W3C trace contexts of the traced
    requests that wait for the query. The texts come late in the message, because Redis's log of slow commands
    keeps the first 128 bytes.
    """

    id: bytes
    answers: str
    expires_at: int
    max_text_chars: int
    spec: bytes  # EncodingSpec.to_json() as JSON, the same bytes for the same spec
    texts: list[bytes]
    traceparents: list[str] = []


class QueryAccepted(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The answer of a worker that has taken the query; its heartbeats name the query until it is answered."""

    id: bytes
    worker: str


class EncodedTexts(msgspec.Struct, frozen=True, array_like=True, tag="encoded"):
    """The vectors of a query's texts: `values` is float32 [texts, dimensions], little-endian.

    Representations have no dimensions: then `values` are their packed forms, and `sizes`, int32 [texts], the bytes of
    each. A text without a vector has zeros there and a reason in `failures`. `num_tokens` is int32 [texts],
    little-endian, the number of tokens that the model read; `truncated` are the texts that had more.
    """

    id: bytes
    dimensions: int
    values: bytes
    failures: dict[int, str]
    num_tokens: bytes
    truncated: list[int]
    sizes: bytes = b""


class NotEncoded(msgspec.Struct, frozen=True, array_like=True, tag="not encoded"):
    """The answer of a worker that failed to encode the query.

    Another worker may succeed, and so may this one when the texts are in another batch.
    """

    id: bytes
    reason: str


Answer = QueryAccepted | EncodedTexts | NotEncoded


T = TypeVar("T")


class UnreadableMessage(ValueError):
    """The message does not have this version's format; anyone who reaches Redis can write one."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_QUERY_DECODER: Final = msgspec.msgpack.Decoder(Query)
_ANSWER_DECODER: Final = msgspec.msgpack.Decoder(Answer)


def write_message(message: Query | Answer) -> bytes:
    return VERSION + _ENCODER.encode(message)


def read_query(message: bytes) -> Query:
    """Decode a query. Raise UnreadableMessage."""
    return _read(message, _QUERY_DECODER)


def read_answer(message: bytes) -> Answer:
    """Decode an answer. Raise UnreadableMessage."""
    answer: Answer = _read(message, _ANSWER_DECODER)
    return answer


def _read(message: bytes, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    if message[:1] != VERSION:
        raise UnreadableMessage(
            f"The message has version {message[:1].hex() or 'none'}, not {VERSION.hex()}."
        )
    try:
        return decoder.decode(message[1:])
    except msgspec.MsgspecError as error:
        raise UnreadableMessage("The message does not match the format of its version.") from error


def write_pulse(in_hand: set[bytes]) -> bytes:
    """Encode a worker's heartbeat: the ids of the queries that it holds."""
    return VERSION + _ENCODER.encode(sorted(in_hand))


def read_pulse(message: bytes) -> set[bytes]:
    """Decode the ids of the queries that a worker holds. Raise UnreadableMessage."""
    return set(_read(message, msgspec.msgpack.Decoder(list[bytes])))


def write_spec(spec: EncodingSpec) -> bytes:
    return msgspec.json.encode(spec.to_json())


def read_spec(message: bytes) -> EncodingSpec:
    """Decode a spec. Raise UnreadableMessage."""
    try:
        return EncodingSpec.from_json(msgspec.json.decode(message))
    except (msgspec.MsgspecError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableMessage("The spec cannot be decoded.") from error


def name_space(model: str, revision: str, pooling: str) -> str:
    """Return the id of the queue for this model, revision and pooling.

    The id is a hash of all three, so that no worker gets a query that it cannot encode.
    """
    space = "\0".join((model, revision, pooling)).encode()
    return hashlib.blake2b(space, digest_size=8).hexdigest()


def queue_key(space: str) -> str:
    """Return the key of the list of waiting queries, the oldest first."""
    return f"{PREFIX}{space}"


def listeners_key(space: str) -> str:
    """Return the key that exists while at least one worker takes queries from that list."""
    return f"{PREFIX}{space}:listeners"


def pulse_key(worker: str) -> str:
    return f"{PREFIX}worker:{worker}"


def bell_key(worker: str) -> str:
    """Return the key of the list that wakes a worker's own threads when the worker shuts down."""
    return f"{PREFIX}worker:{worker}:bell"


def answers_key(api: str) -> str:
    return f"{PREFIX}answers:{api}"


HEAR_SECONDS: Final = 5.0
# If no worker takes queries, their list is deleted when the last of them has expired.
POST: Final = """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""


class QueryProducer:
    """The API's end of the query queue: posts queries and receives answers, on one event loop.

    Every method but `close` raises redis.exceptions.RedisError while Redis is away.
    """

    def __init__(self, redis_url: str) -> None:
        self.address = answers_key(secrets.token_hex(8))
        self._redis = AsyncRedis.from_url(
            redis_url,
            socket_timeout=2 * HEAR_SECONDS,
            socket_connect_timeout=1,
            retry=AsyncRetry(NoBackoff(), 0),
        )
        self._post = self._redis.register_script(POST)

    async def ask_time(self) -> float:
        """Return the time on Redis's clock in seconds, by which queries expire."""
        seconds, microseconds = await self._redis.time()
        return float(seconds) + float(microseconds) / 1e6

    async def post(self, space: str, message: bytes, seconds: float) -> bool:
        """Post a query to the workers of this queue. Return False, and post nothing, if there are none."""
        keys = [queue_key(space), listeners_key(space)]
        return bool(await self._post(keys=keys, args=[message, int(seconds * 1000)]))

    async def hear(self) -> Answer | None:
        """Wait for the next answer and return it; None after a time-out. Raise UnreadableMessage."""
        found = await cast(Any, self._redis.blpop([self.address], timeout=HEAR_SECONDS))
        return None if found is None else read_answer(found[1])

    async def look_at_workers(self, workers: Iterable[str]) -> dict[str, set[bytes]]:
        """Return by worker the ids of the queries that it holds; none for a dead worker."""
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
        """Return whether the query is still queued and a live worker may take it.

        If it is queued but no worker is alive, remove it from the queue.
        """
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


# The time-out of a thread that waits for a query; Redis wakes it at once when there is one.
TAKE_SECONDS: Final = 5.0
# The lifetime of answers that no API process reads, because it has ended.
ANSWERS_SECONDS: Final = 30.0


class QueryConsumer:
    """The worker's end of the query queue: takes queries and sends answers. Thread-safe.

    Every method but `close` raises redis.exceptions.RedisError while Redis is away.
    """

    def __init__(self, redis_url: str, space: str, worker: str) -> None:
        self._queue, self._listeners, self._pulse = queue_key(space), listeners_key(space), pulse_key(worker)
        self._bell = bell_key(worker)
        # A blindly repeated command may run twice, so retries are left to the caller.
        self._redis = Redis.from_url(
            redis_url, socket_timeout=2 * TAKE_SECONDS, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
        )
        self._clock_offset = 0.0

    def beat(self, in_hand: set[bytes]) -> None:
        """Send a heartbeat with the ids of the queries that this worker holds, and read Redis's clock."""
        milliseconds = int(DEAD_SECONDS * 1000)
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.set(self._pulse, write_pulse(in_hand), px=milliseconds)
            pipeline.set(self._listeners, b"", px=milliseconds)
            pipeline.time()
            seconds, microseconds = pipeline.execute()[-1]
        self._clock_offset = seconds + microseconds / 1e6 - time.monotonic()

    def take(self) -> Query | None:
        """Return the oldest query; None after a time-out or a `wake`. Raise UnreadableMessage."""
        found = self._redis.blpop([self._bell, self._queue], timeout=TAKE_SECONDS)
        if found is None or found[0] == self._bell.encode():
            return None
        return read_query(cast(bytes, found[1]))

    def wake(self, num_threads: int) -> None:
        """Make this many threads that wait in `take` return at once."""
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.rpush(self._bell, *[b""] * num_threads)
            pipeline.pexpire(self._bell, int(TAKE_SECONDS * 1000))
            pipeline.execute()

    def is_expired(self, query: Query) -> bool:
        """Return whether the query has expired, so that no client waits for it any more."""
        return (time.monotonic() + self._clock_offset) * 1000 >= query.expires_at

    def answer(self, query: Query, answer: Answer) -> None:
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.rpush(query.answers, write_message(answer))
            pipeline.pexpire(query.answers, int(ANSWERS_SECONDS * 1000))
            pipeline.execute()

    def leave(self) -> None:
        """Delete this worker's heartbeat, so that it no longer holds any query."""
        self._redis.delete(self._pulse, self._bell)

    def close(self) -> None:
        """Close the connections. Call this when no thread is in any other method."""
        self._redis.close()
