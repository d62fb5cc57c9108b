"""Chunk: the part of a job that one worker holds at a time; how large it is, and how its texts are kept."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

import msgspec
import zstandard
from sqlalchemy import Connection, text

from vectormill.domain.encoding import PASSAGES, EncodingSpec
from vectormill.domain.errors import PayloadGone, SpecMismatch
from vectormill.domain.schema import PromptEstimate
from vectormill.domain.states import States
from vectormill.jobs.item import Item, ItemFailure, Items

PENDING: Final = "pending"
QUEUED: Final = "queued"
LEASED: Final = "leased"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
SPLIT: Final = "split"

# In the order of a chunk's way: two that no worker has, one that it has, and the ends.
UNCLAIMED_CHUNK_STATES: Final = States((PENDING, QUEUED))
OPEN_CHUNK_STATES: Final = States((*UNCLAIMED_CHUNK_STATES, LEASED))
CHUNK_STATES: Final = States((*OPEN_CHUNK_STATES, DONE, FAILED, CANCELLED, SPLIT))


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's right to one chunk until its lease ends. The fence is what every later write is checked against.

    `first_item` is the position in the job of the chunk's first item. After a retry `only_items` names the positions
    within the chunk that are to be encoded; the others have their vectors. `attempt` counts claims that failed,
    and this one; `lost` the ends of a process that speak against the texts; `lapsed` the leases that ended otherwise.
    `job_seq` is the job's place in the order of writers. `generation_fingerprint` names the vector space of the
    generation that it writes. `num_tokens` is an estimate.
    """

    chunk_id: int
    fence: int
    attempt: int
    lost: int
    lapsed: int
    num_items: int
    first_item: int
    only_items: tuple[int, ...] | None
    job_id: UUID
    job_seq: int
    job_priority: int
    spec: EncodingSpec
    generation_id: int | None
    keep_text: bool = False
    generation_fingerprint: str | None = None
    num_tokens: int = 0
    traceparent: str | None = None  # of the request that submitted the job

    def check_space(self) -> None:
        """Raise SpecMismatch when the generation holds vectors of another space than the job's."""
        ours = self.spec.fingerprint()
        if self.generation_fingerprint not in (None, ours):
            raise SpecMismatch(
                f"Generation {self.generation_id} holds vectors of {self.generation_fingerprint}, and the job's are of "
                f"{ours} ({self.spec.model} {self.spec.revision}); vector spaces are never mixed."
            )

    def wanted_items(self, start: int, stop: int) -> list[int] | None:
        """Return the positions, counted from `start`, that are to be encoded between `start` and `stop`; None means
        all.
        """
        if self.only_items is None:
            return None
        return [item - start for item in self.only_items if start <= item < stop]


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """The outcome of encoding a chunk, besides its vectors.

    `failures` maps the position of an item in the chunk to the reason it has no vector. `num_computed_tokens` counts
    the padding too. `truncated` are the positions of items that were cut; `num_passages` counts the passages of those
    that were not. `num_reused` counts the texts, or passages of them, whose vector was taken over from an equal one.
    `stage_seconds` is busy time by stage name. `item_tokens` are the tokens of each item that was encoded, in order, or
    empty where nobody counted them.
    """

    failures: Mapping[int, ItemFailure]
    num_tokens: int
    num_computed_tokens: int
    truncated: Sequence[int] = ()
    num_passages: int = 0
    num_reused: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    item_tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One message to publish: a chunk that was marked queued for a model's queue."""

    chunk_id: int
    dispatch_seq: int
    job_id: UUID
    seq: int
    num_items: int
    model: str
    priority: int
    num_tokens: int = 0  # estimated

    def message(self) -> dict[str, Any]:
        return {"chunk_id": self.chunk_id, "dispatch_seq": self.dispatch_seq}


# Where a job begins. Half a second of a small model on two cores, and what a job of some hundred texts is spread by.
SMALLEST_CHUNK_TOKENS: Final = 4096
# Two full batches of a GPU. Message, claim and commit cost some 10 ms of a core, so there must not be hundreds a
# second; on two cores it is half a minute's work, which is how late a job's progress and its turn may be.
LARGEST_CHUNK_TOKENS: Final = 65_536
# No chunk has more than this share of what came before it: the last one of a job keeps one worker busy for a ninth of
# the time at the most, however many others have ended by then.
_SHARE: Final = 8
# A classifier token and a separator, or the like of another tokenizer.
_SPECIAL_TOKENS: Final = 2


def estimate_tokens(text: bytes) -> int:
    """Estimate the tokens of UTF-8 text without the special ones: one for four letters of ASCII, and one for each of
    Chinese.

    (3 bytes - letters) / 8 is a quarter of one-byte letters, five eighths of two-byte ones (Cyrillic, Greek: one token
    with an English vocabulary, four letters with a multilingual one) and all of three-byte ones.
    """
    num_bytes = len(text)
    if text.isascii():
        return num_bytes >> 2
    return (3 * num_bytes - len(text.decode(errors="replace"))) >> 3


class TokenEstimate:
    """An estimate of how many tokens the items of one spec have."""

    def __init__(self, spec: EncodingSpec) -> None:
        self._extra = estimate_tokens(spec.prompt.encode()) + _SPECIAL_TOKENS
        self._is_cut = spec.long_texts != PASSAGES
        self._max_tokens = spec.max_tokens
        self._prompts: PromptEstimate | None = None
        if spec.extract_schema:
            self._prompts = PromptEstimate(json.loads(spec.extract_schema), estimate_tokens)

    def of(self, text: bytes) -> int:
        """Estimate the tokens that are read of a text, prompts and special tokens included, as often as it is
        read.
        """
        if self._prompts is not None:
            return self._prompts.of(estimate_tokens(text))
        tokens = estimate_tokens(text) + self._extra
        return min(tokens, self._max_tokens) if self._is_cut else tokens

    def of_all(self, texts: Sequence[bytes]) -> int:
        """Estimate the tokens of many texts by their bytes alone, nothing cut off: for a bound of memory, at
        once.
        """
        num_tokens = sum(map(len, texts)) // 4
        if self._prompts is None or not texts:
            return num_tokens
        return len(texts) * self._prompts.of(num_tokens // len(texts))


def choose_chunk_tokens(num_tokens_before: int) -> int:
    """Return the number of tokens at which the next chunk of a job is closed, after so many have come already."""
    return min(max(num_tokens_before // _SHARE, SMALLEST_CHUNK_TOKENS), LARGEST_CHUNK_TOKENS)


# Level 1: on docstrings it compresses threefold at several hundred MB/s; higher levels only move the bottleneck here.
_COMPRESSION_LEVEL = 1
_MAX_PAYLOAD_BYTES = 1 << 30
_DECODER = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]])
_NOTHING = msgspec.msgpack.encode(b"")


def encode_payload(items: Sequence[Item]) -> bytes:
    """Return the blob of `items`: zstd over MessagePack, in the order given."""
    columns = Items.of(items)
    rows = list(zip(columns.keys, columns.texts, columns.metadata, strict=True))
    return _compress(msgspec.msgpack.encode(rows))


def _compress(rows: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(rows)


def decode_payload(blob: bytes) -> Items:
    """Return the items of a blob made by `encode_payload`, as columns."""
    rows = zstandard.ZstdDecompressor().decompress(blob, max_output_size=_MAX_PAYLOAD_BYTES)
    decoded = _DECODER.decode(rows)
    return Items(*zip(*decoded, strict=True)) if decoded else Items((), (), ())


def read_keys(blob: bytes) -> list[str]:
    """Return the keys of a blob's items; their texts are passed over."""
    return [key for key, _, _ in _read_raw(blob)]


def empty_items(blob: bytes, keys: Set[str]) -> tuple[bytes | None, int]:
    """Return the blob without text and metadata of the items with these keys, and how many had any; else None."""
    rows = _read_raw(blob)
    places = [
        place
        for place, (key, text, metadata) in enumerate(rows)
        if key in keys and (bytes(text), bytes(metadata)) != (_NOTHING, _NOTHING)
    ]
    if not places:
        return None, 0
    for place in places:
        rows[place] = (rows[place][0], msgspec.Raw(_NOTHING), msgspec.Raw(_NOTHING))
    return _compress(msgspec.msgpack.encode(rows)), len(places)


def _read_raw(blob: bytes) -> list[tuple[str, msgspec.Raw, msgspec.Raw]]:
    rows = zstandard.ZstdDecompressor().decompress(blob, max_output_size=_MAX_PAYLOAD_BYTES)
    return msgspec.msgpack.decode(rows, type=list[tuple[str, msgspec.Raw, msgspec.Raw]])


def load_payload(connection: Connection, chunk_id: int) -> Items:
    """Return the items of a chunk. Raise PayloadGone when the pruner has removed them."""
    row = connection.execute(
        text("SELECT items, places FROM vectormill.chunk_payloads WHERE chunk_id = :chunk_id"),
        {"chunk_id": chunk_id},
    ).one_or_none()
    return open_payload(None, chunk_id) if row is None else open_payload(row.items, chunk_id, row.places)


def open_payload(blob: bytes | None, chunk_id: int, places: Sequence[int] | None = None) -> Items:
    """Return the items of a chunk whose blob was read with its claim. Raise PayloadGone when there is none."""
    if blob is None:
        raise PayloadGone(f"Chunk {chunk_id} has no texts any more, because its job's retention has ended.")
    items = decode_payload(blob)
    return items if places is None else replace(items, places=places)
