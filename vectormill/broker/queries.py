"""The queue of queries in Redis: its messages and keys, the API's end (QueryProducer) and the worker's (QueryConsumer).

Only these messages carry texts: a query is no durable work, and nobody wants it after its client has gone
(docs/decisions/0023). Each message is a byte with its version, and MessagePack. New fields go to the end of a list,
where an earlier release passes them over.
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
# A worker says so often that it lives and what it has in hand, and counts as dead so long after the last time.
PULSE_SECONDS: Final = 0.2
DEAD_SECONDS: Final = 0.6


class Query(msgspec.Struct, frozen=True, array_like=True):
    """Texts (UTF-8, lone surrogates kept) that are to become vectors of one spec.

    `answers` is the list for the answers, `expires_at` the moment, in milliseconds on Redis's clock, from which nobody
    waits. The texts come late: what Redis keeps of a slow command are its first 128 bytes. `traceparents` are of the
    requests that wait for it and are traced (W3C Trace Context).
    """

    id: bytes
    answers: str
    expires_at: int
    max_text_chars: int
    spec: bytes  # EncodingSpec.to_json() as JSON, the same bytes for the same spec
    texts: list[bytes]
    traceparents: list[str] = []


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """A worker has the query in hand, and says so with its pulse until it has answered."""

    id: bytes
    worker: str


class EncodedTexts(msgspec.Struct, frozen=True, array_like=True, tag="encoded"):
    """float32 [texts, dimensions], little-endian, zeros for a text that has no vector: `failures` has the reason.

    `num_tokens` is int32 [texts], little-endian, of what the model read; `truncated` are the texts that had more.
    """

    id: bytes
    dimensions: int
    values: bytes
    failures: dict[int, str]
    num_tokens: bytes
    truncated: list[int]


class NotEncoded(msgspec.Struct, frozen=True, array_like=True, tag="not encoded"):
    """This worker did not encode the query; another one may, or this one beside other texts."""

    id: bytes
    reason: str


Answer = Taken | EncodedTexts | NotEncoded


T = TypeVar("T")


class UnreadableMessage(ValueError):
    """The message is none of this version: whoever reaches Redis can write there."""


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
            f"The message is of version {message[:1].hex() or 'none'}, not {VERSION.hex()}."
        )
    try:
        return decoder.decode(message[1:])
    except msgspec.MsgspecError as error:
        raise UnreadableMessage("The message does not match its version.") from error


def write_pulse(in_hand: set[bytes]) -> bytes:
    """Encode the ids of the queries that a worker has in hand."""
    return VERSION + _ENCODER.encode(sorted(in_hand))


def read_pulse(message: bytes) -> set[bytes]:
    """Decode the ids of the queries that a worker has in hand. Raise UnreadableMessage."""
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
    """Return the name of the list for queries of this very model, so that no worker gets one that it cannot encode."""
    space = "\0".join((model, revision, pooling)).encode()
    return hashlib.blake2b(space, digest_size=8).hexdigest()


def queue_key(space: str) -> str:
    """Return the list in which queries wait, the oldest first."""
    return f"{PREFIX}{space}"


def listeners_key(space: str) -> str:
    """Return the key that is there while a worker takes from that list."""
    return f"{PREFIX}{space}:listeners"


def pulse_key(worker: str) -> str:
    return f"{PREFIX}worker:{worker}"


def bell_key(worker: str) -> str:
    """Return the list that wakes a worker's own threads when it is to end."""
    return f"{PREFIX}worker:{worker}:bell"


def answers_key(api: str) -> str:
    return f"{PREFIX}answers:{api}"


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
        self._redis = AsyncRedis.from_url(
            redis_url,
            socket_timeout=2 * HEAR_SECONDS,
            socket_connect_timeout=1,
            retry=AsyncRetry(NoBackoff(), 0),
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
