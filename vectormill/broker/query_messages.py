"""The messages about queries between an API and a worker, and the keys in Redis that carry them.

Only these messages carry texts: a query is no durable work, and nobody wants it after its client has gone
(docs/decisions/0023). Each message is a byte with its version, and MessagePack. New fields go to the end of a list,
where an earlier release passes them over.
"""

import hashlib
from typing import Final, TypeVar

import msgspec

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
    """There while a worker takes from that list."""
    return f"{PREFIX}{space}:listeners"


def pulse_key(worker: str) -> str:
    return f"{PREFIX}worker:{worker}"


def bell_key(worker: str) -> str:
    """Return the list that wakes a worker's own threads when it is to end."""
    return f"{PREFIX}worker:{worker}:bell"


def answers_key(api: str) -> str:
    return f"{PREFIX}answers:{api}"
