"""The query queue in Redis: messages, keys, the API's QueryProducer and the worker's QueryConsumer.

Only these messages contain texts: a query is not durable, and is worthless once its client has gone
(docs/decisions/0023). Each message is a version byte followed by MessagePack. New fields go to the end of a
list, where an earlier release ignores them.

A query is signed, and so is its answer, together with the signature of the query, so that it fits no other query
(docs/decisions/0106). An answer begins with SIGNED, the query's id and the signature instead of the version.
"""

import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from redis import Redis
from redis._parsers import _AsyncRESP2Parser  # there is no public way to bound the size of a reply
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from vectormill.domain.encoding import EncodingSpec
from vectormill.vectors.representations import unpack

VERSION: Final = b"\x01"
SIGNED: Final = b"\x02"
ID_BYTES: Final = 8
SIGNATURE_BYTES: Final = 32
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
    signature: bytes = b""  # of all that stands before it

    def encode_signed_part(self) -> bytes:
        return _ENCODER.encode(msgspec.structs.astuple(self)[: QUERY_FIELDS.index("signature")])

    def sign(self, signer: "Signer") -> "Query":
        """Return the query with its signature."""
        return msgspec.structs.replace(self, signature=signer.sign(b"query", self.encode_signed_part()))


QUERY_FIELDS: Final = Query.__struct_fields__


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

    def read_vectors(self, num_texts: int) -> NDArray[Any]:
        """Return float32 [texts, dimensions], or Representations [texts], None for a text without.

        Raise ValueError if the sizes do not match.
        """
        if self.dimensions > 0:
            return np.frombuffer(self.values, "<f4").reshape(num_texts, self.dimensions)
        sizes = np.frombuffer(self.sizes, "<i4").reshape(num_texts)
        if sizes.sum() != len(self.values):
            raise ValueError("the sizes are not those of the packed forms")
        ends = zip(sizes.tolist(), np.cumsum(sizes).tolist(), strict=True)
        rows = (unpack(self.values[end - size : end]) if size else None for size, end in ends)
        return np.fromiter(rows, np.object_, num_texts)


class NotEncoded(msgspec.Struct, frozen=True, array_like=True, tag="not encoded"):
    """The answer of a worker that failed to encode the query.

    Another worker may succeed, and so may this one when the texts are in another batch.
    """

    id: bytes
    reason: str


Answer = QueryAccepted | EncodedTexts | NotEncoded


T = TypeVar("T")


REFUSALS: Final = {
    "unreadable": "the message does not have the format of its version",
    "unsigned": "the message has no signature, as those of processes of an earlier release, or of a stranger",
    "forged": "the message has a signature that the key of this installation does not give for it",
    "oversized": "the message is larger than any answer",
}


class UnreadableMessage(ValueError):
    """No process of ours has written the message, for one of the reasons in REFUSALS."""

    def __init__(self, reason: str = "unreadable", query_id: bytes = b"") -> None:
        super().__init__(REFUSALS[reason])
        self.reason, self.query_id = reason, query_id


@dataclass(frozen=True, slots=True)
class Signer:
    """A key from Postgres, and the time on the monotonic clock from which messages without a signature are refused."""

    key: bytes
    required_from: float = 0.0

    def sign(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256, 32 bytes, of the parts in this order."""
        return hmac.digest(self.key, b"".join(parts), "sha256")

    def check(self, query_id: bytes, signature: bytes, *parts: bytes) -> None:
        """Raise UnreadableMessage unless it is the signature of these parts, or there is none and needs not be."""
        if signature and not hmac.compare_digest(signature, self.sign(*parts)):
            raise UnreadableMessage("forged", query_id)
        if not signature and time.monotonic() >= self.required_from:
            raise UnreadableMessage("unsigned", query_id)


_ENCODER: Final = msgspec.msgpack.Encoder()
_QUERY_DECODER: Final = msgspec.msgpack.Decoder(Query)
_ANSWER_DECODER: Final = msgspec.msgpack.Decoder(Answer)


def write_query(query: Query) -> bytes:
    return VERSION + _ENCODER.encode(query)


def read_query(message: bytes, signer: Signer) -> Query:
    """Decode a query. Raise UnreadableMessage, also if it has no or another signature."""
    query = _read(message, _QUERY_DECODER)
    signer.check(query.id, query.signature, b"query", query.encode_signed_part())
    return query


def write_answer(query: Query, answer: Answer, signer: Signer) -> bytes:
    """Encode an answer with a signature, unless the query has none and is of an API that cannot read it."""
    content = _ENCODER.encode(answer)
    if not query.signature:
        return VERSION + content
    return b"".join((SIGNED, query.id, signer.sign(b"answer", query.signature, content), content))


def read_answer(message: bytes, find: Callable[[bytes], bytes | None], signer: Signer) -> Answer | None:
    """Decode an answer; None if it is to no query for which `find` returns the signature by the id.

    Raise UnreadableMessage, also if it has no or another signature.
    """
    is_signed = message[:1] == SIGNED
    if is_signed:
        query_id, rest = message[1 : 1 + ID_BYTES], message[1 + ID_BYTES :]
        signature, content = rest[:SIGNATURE_BYTES], rest[SIGNATURE_BYTES:]
        if (query := find(query_id)) is None:
            return None
        signer.check(query_id, signature or b"none", b"answer", query, content)
        message = VERSION + content
    answer: Answer = _read(message, _ANSWER_DECODER)
    if find(answer.id) is None:
        return None
    if not is_signed:
        signer.check(answer.id, b"")
    return answer


def _read(message: bytes, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    if message[:1] != VERSION:
        raise UnreadableMessage
    try:
        return decoder.decode(message[1:])
    except msgspec.MsgspecError as error:
        raise UnreadableMessage from error


def read_pulse(message: bytes) -> set[bytes]:
    """Decode the ids of the queries that a worker holds. Raise UnreadableMessage."""
    return set(_read(message, msgspec.msgpack.Decoder(list[bytes])))


@functools.lru_cache(maxsize=256)
def write_spec(spec: EncodingSpec) -> bytes:
    return msgspec.json.encode(spec.to_json())


@functools.lru_cache(maxsize=256)
def read_spec(message: bytes) -> EncodingSpec:
    """Decode a spec. Raise UnreadableMessage."""
    try:
        return EncodingSpec.from_json(msgspec.json.decode(message))
    except (msgspec.MsgspecError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableMessage from error


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


QUERY_KEY: Final = "queries"  # the name of the signing key in Postgres
RECEIVE_SECONDS: Final = 5.0
MAX_REPLY_BYTES: Final = 128 << 20


class BoundedParser(_AsyncRESP2Parser):
    """A parser of Redis's replies that reads no value of more than MAX_REPLY_BYTES into memory.

    redis-py closes the connection then, and opens another.
    """

    async def _read(self, length: int) -> bytes:
        if length > MAX_REPLY_BYTES:
            raise UnreadableMessage("oversized")
        return await super()._read(length)


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

    def __init__(self, redis_url: str, signer: Signer) -> None:
        self.signer = signer
        self.address = f"{PREFIX}answers:{secrets.token_hex(8)}"
        self._redis = AsyncRedis.from_url(
            redis_url,
            socket_timeout=2 * RECEIVE_SECONDS,
            socket_connect_timeout=1,
            retry=AsyncRetry(NoBackoff(), 0),
            parser_class=BoundedParser,
            protocol=2,
        )
        self._post = self._redis.register_script(POST)
        self._clock_offset: float | None = None

    async def find_expiry(self, seconds: float) -> int:
        """Return the time in so many seconds, in milliseconds on Redis's clock, by which queries expire."""
        if self._clock_offset is None:
            whole, microseconds = await self._redis.time()
            self._clock_offset = whole + microseconds / 1e6 - time.monotonic()
        return int((time.monotonic() + self._clock_offset + seconds) * 1000)

    async def post(self, space: str, message: bytes, seconds: float) -> bool:
        """Post a query to the workers of this queue. Return False, and post nothing, if there are none."""
        keys = [queue_key(space), listeners_key(space)]
        try:
            return bool(await self._post(keys=keys, args=[message, int(seconds * 1000)]))
        except RedisError:
            self._clock_offset = None  # the next reply may come from another Redis
            raise

    async def receive(self, find: Callable[[bytes], bytes | None]) -> Answer | None:
        """Wait for the next message and return the answer in it, as read_answer does; None also after a time-out."""
        found = await cast(Any, self._redis.blpop([self.address], timeout=RECEIVE_SECONDS))
        return None if found is None else read_answer(found[1], find, self.signer)

    async def is_held(self, worker: str, query_id: bytes) -> bool:
        """Return whether a live worker says that it holds the query."""
        pulse = await cast(Any, self._redis.get(pulse_key(worker)))
        try:
            return pulse is not None and query_id in read_pulse(pulse)
        except UnreadableMessage:
            return False

    async def is_queued(self, space: str, message: bytes) -> bool:
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
    """The worker's end of the query queues of its `spaces`: takes queries and sends answers. Thread-safe.

    Every method but `close` raises redis.exceptions.RedisError while Redis is away.
    """

    def __init__(self, redis_url: str, spaces: Sequence[str], worker: str, signer: Signer) -> None:
        self._signer = signer
        self._queues, self._pulse = [queue_key(space) for space in spaces], pulse_key(worker)
        self._listeners = [listeners_key(space) for space in spaces]
        self._bell = f"{self._pulse}:bell"  # a list that wakes the worker's own threads when it shuts down
        # A blindly repeated command may run twice, so retries are left to the caller.
        self._redis = Redis.from_url(
            redis_url, socket_timeout=2 * TAKE_SECONDS, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
        )
        self._clock_offset = 0.0

    def beat(self, in_hand: set[bytes]) -> None:
        """Send a heartbeat with the ids of the queries that this worker holds, and read Redis's clock."""
        milliseconds = int(DEAD_SECONDS * 1000)
        with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.set(self._pulse, VERSION + _ENCODER.encode(sorted(in_hand)), px=milliseconds)
            for key in self._listeners:
                pipeline.set(key, b"", px=milliseconds)
            pipeline.time()
            seconds, microseconds = pipeline.execute()[-1]
        self._clock_offset = seconds + microseconds / 1e6 - time.monotonic()

    def take(self) -> Query | None:
        """Return the oldest query; None after a time-out or a `wake`. Raise UnreadableMessage."""
        found = self._redis.blpop([self._bell, *self._queues], timeout=TAKE_SECONDS)
        if found is None or found[0] == self._bell.encode():
            return None
        return read_query(cast(bytes, found[1]), self._signer)

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
            pipeline.rpush(query.answers, write_answer(query, answer, self._signer))
            pipeline.pexpire(query.answers, int(ANSWERS_SECONDS * 1000))
            pipeline.execute()

    def leave(self) -> None:
        """Delete this worker's heartbeat, so that it no longer holds any query."""
        self._redis.delete(self._pulse, self._bell)

    def close(self) -> None:
        """Close the connections. Call this when no thread is in any other method."""
        self._redis.close()
