"""Chunk: the part of a job that one worker leases at a time, its size, and the encoding of its texts."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

import msgspec
import zstandard
from sqlalchemy import Connection, text

from vectormill.domain.encoding import IN_WINDOWS, LATE, EncodingSpec
from vectormill.domain.errors import ObjectChanged, PayloadGone, SpecMismatch
from vectormill.domain.schema import PromptEstimate
from vectormill.domain.states import States
from vectormill.jobs.item import Item, ItemFailure, Items, split_pair
from vectormill.objects.reference import MARK, decode_reference, is_reference

PENDING: Final = "pending"
QUEUED: Final = "queued"
LEASED: Final = "leased"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
SPLIT: Final = "split"

# The states in the order in which a chunk passes through them: first two without a worker, then the leased
# one, then the final ones.
UNCLAIMED_CHUNK_STATES: Final = States((PENDING, QUEUED))
OPEN_CHUNK_STATES: Final = States((*UNCLAIMED_CHUNK_STATES, LEASED))

# For statements that name a chunk by its id. The planner believes that the index of leased chunks is nearly empty, and
# would look the id up by reading all of them; of this expression it cannot tell that the index has what is wanted.
IS_LEASED: Final = "state || '' = 'leased'"


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's claim on one chunk until its lease ends. Every later write is checked against the fence.

    `first_item` is the position of the chunk's first item in the job. After a retry, or if vectors
    were faulty, `only_items` names the positions within the chunk that are to be encoded; the other items already have
    their vectors. `attempt`
    counts the failed claims and this one, `lost` the crashes that the chunk's texts may have caused, and
    `lapsed` the leases that ended for other reasons. `job_seq` orders the job among all writers of its
    collection. `generation_fingerprint` names the vector space of the generation that the chunk is written
    to. `num_tokens` is an estimate. `output_url` is the folder of an object store into which the results go,
    and `output_schema` the serialized Arrow schema that they get there for a table. With `is_fill` the job was
    filling its generation (vectormill/collections/bulk_loads.py) when the chunk was claimed for the first time. A chunk
    that `is_faulty` has vectors that a faulty worker computed.
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
    traceparent: str | None = None  # W3C trace context of the request that submitted the job
    output_url: str | None = None
    output_schema: bytes | None = None
    is_fill: bool = False
    is_faulty: bool = False

    def check_space(self) -> None:
        """Raise SpecMismatch if the vectors of the generation are in another vector space than the job's."""
        ours = self.spec.fingerprint()
        if self.generation_fingerprint not in (None, ours):
            raise SpecMismatch(
                f"Generation {self.generation_id} contains vectors of space {self.generation_fingerprint}, but the "
                f"job's are of {ours} ({self.spec.model} {self.spec.revision}); vector spaces are never mixed."
            )

    def wanted_items(self, start: int, stop: int) -> list[int] | None:
        """Return the positions from `start` up to `stop` that are to be encoded.

        They are relative to `start`; None means all.
        """
        if self.only_items is None:
            return None
        return [item - start for item in self.only_items if start <= item < stop]


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """The outcome of encoding a chunk, besides its vectors.

    `failures` maps the position of an item in the chunk to the reason why it has no vector.
    `num_computed_tokens` includes padding. `truncated` are the positions of items that were cut;
    `num_passages` counts the passages of items that were split instead. `num_reused` counts the texts or
    passages whose vector was copied from an equal one, and `num_repeated` the items of a collection whose row was
    replaced by that of a later item with the same key in the chunk. `stage_seconds` is busy time by stage name.
    `item_tokens` are the token counts of the encoded items in their order, or empty if they were not counted.
    `proof_id` is the worker's period between two proofs in which the results were computed.
    """

    failures: Mapping[int, ItemFailure]
    num_tokens: int
    num_computed_tokens: int
    truncated: Sequence[int] = ()
    num_passages: int = 0
    num_reused: int = 0
    num_repeated: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    item_tokens: Sequence[int] = ()
    proof_id: int | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One message to publish: a chunk that was marked as queued for the queue of a model."""

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


# The size at the beginning of a job: half a second of a small model on two cores. It spreads a job of a few
# hundred texts over several workers.
SMALLEST_CHUNK_TOKENS: Final = 4096
# Two full batches of a GPU. Message, claim and commit cost some 10 ms of a core, so there must not be
# hundreds of chunks a second. On two cores such a chunk takes half a minute, which is also how late a job's
# progress and its turn may be.
LARGEST_CHUNK_TOKENS: Final = 65_536
# A chunk has at most one eighth of the tokens that came before it. So the last chunk of a job keeps one
# worker busy for at most a ninth of the total time, even if all others have ended by then.
_SHARE: Final = 8
# The classifier token and the separator, or their equivalents in another tokenizer.
USUAL_SPECIAL_TOKENS: Final = 2


def estimate_tokens(text: bytes) -> int:
    """Estimate the tokens of a UTF-8 text, without special tokens.

    One token is assumed for four ASCII letters and one for each Chinese character. (3 bytes - letters) / 8 is
    a quarter for one-byte letters, five eighths for two-byte ones (Cyrillic, Greek: one token with an English
    vocabulary, four letters with a multilingual one) and one for three-byte ones.
    """
    num_bytes = len(text)
    if text.isascii():
        return num_bytes >> 2
    return (3 * num_bytes - len(text.decode(errors="replace"))) >> 3


class TokenEstimate:
    """An estimator of how many tokens the items of one spec have."""

    def __init__(self, spec: EncodingSpec) -> None:
        self._extra = estimate_tokens(spec.prompt.encode()) + USUAL_SPECIAL_TOKENS
        self._is_cut = spec.long_texts not in IN_WINDOWS
        self._is_late = spec.long_texts == LATE
        self._max_tokens = spec.max_tokens
        self._prompts: PromptEstimate | None = None
        if spec.extract_schema:
            self._prompts = PromptEstimate(json.loads(spec.extract_schema), estimate_tokens)

    def of(self, text: bytes) -> int:
        """Estimate how many tokens the model reads for one text.

        Prompts and special tokens are included. With an extract schema the text is read once for each hint and
        counts as often. The overlap of windows is not counted. Of a passage with its text the passage alone is:
        together the passages are about as long as the text.
        """
        if self._is_late:
            text = split_pair(text)[0]
        if self._prompts is not None:
            return self._prompts.of(estimate_tokens(text))
        tokens = estimate_tokens(text) + self._extra
        return min(tokens, self._max_tokens) if self._is_cut else tokens

    def of_all(self, texts: Sequence[bytes]) -> int:
        """Estimate the tokens of many texts from their total bytes, as a quick bound of memory.

        No text is assumed to be truncated.
        """
        num_tokens = sum(len(split_pair(text)[0]) if self._is_late else len(text) for text in texts) // 4
        if self._prompts is None or not texts:
            return num_tokens
        return len(texts) * self._prompts.of(num_tokens // len(texts))


def choose_chunk_tokens(num_tokens_before: int) -> int:
    """Return the number of tokens at which the next chunk is closed, from the job's tokens before it."""
    return min(max(num_tokens_before // _SHARE, SMALLEST_CHUNK_TOKENS), LARGEST_CHUNK_TOKENS)


# Level 1 compresses texts such as docstrings threefold at several hundred MB/s; higher levels would make
# compression the bottleneck.
_COMPRESSION_LEVEL = 1
_MAX_PAYLOAD_BYTES = 1 << 30
_DECODER = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]])
_NOTHING = msgspec.msgpack.encode(b"")


def encode_payload(items: Sequence[Item]) -> bytes:
    """Encode items, in the given order, as one blob: MessagePack, compressed with zstd."""
    columns = Items.of(items)
    rows = list(zip(columns.keys, columns.texts, columns.metadata, strict=True))
    return _compress(msgspec.msgpack.encode(rows))


def _compress(rows: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(rows)


def decode_payload(blob: bytes) -> Items:
    """Decode a blob made by `encode_payload`, or read the items that a reference names; return them as columns.

    Raise ObjectChanged and StorageUnavailable for a reference.
    """
    if is_reference(blob):
        return decode_reference(blob).read()
    rows = zstandard.ZstdDecompressor().decompress(blob, max_output_size=_MAX_PAYLOAD_BYTES)
    decoded = _DECODER.decode(rows)
    return Items(*zip(*decoded, strict=True)) if decoded else Items((), (), ())


def read_known(blob: bytes) -> Items:
    """Return the items in a blob without reading an object: those behind a reference have no texts.

    Such items are named by their positions, without content hashes, until its results are there.
    """
    return _find_kept(blob) or _name_items(blob) if is_reference(blob) else decode_payload(blob)


def read_keys(blob: bytes) -> list[str]:
    """Return the keys of the items in a blob, as `read_known` does, without decoding texts."""
    return list(read_known(blob).keys) if is_reference(blob) else [key for key, _, _ in _read_raw(blob)]


class _Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """The keys and hashes of 16 bytes that are stored with a reference when its results are committed."""

    keys: list[str] = []
    hashes: bytes = b""


def keep_keys(blob: bytes, items: Items) -> bytes | None:
    """Return the reference that these items were read by with their keys and hashes; None if it has them.

    The results can then be read when the object is another one or gone. Keys that are names by position are not
    repeated. Programs of an earlier release pass over both.
    """
    if _find_kept(blob) is not None:
        return None
    keys = list(items.keys)
    kept = _Kept(
        [] if keys == decode_reference(blob).name_items() else keys, b"".join(items.content_hashes())
    )
    fields = msgspec.msgpack.decode(blob[len(MARK) :])
    return MARK + msgspec.msgpack.encode(fields | {_KEPT: _compress(msgspec.msgpack.encode(kept))})


_KEPT: Final = "kept"


def _find_kept(blob: bytes) -> Items | None:
    """Return the keys and hashes of a reference's items, without their texts; None if it has not kept them."""
    packed = msgspec.msgpack.decode(blob[len(MARK) :]).get(_KEPT)
    if packed is None:
        return None
    kept = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(packed), type=_Kept)
    hashes = [kept.hashes[place : place + 16] for place in range(0, len(kept.hashes), 16)]
    named = _name_items(blob)
    return replace(named, keys=kept.keys or named.keys, hashes=hashes)


def _name_items(blob: bytes) -> Items:
    names = decode_reference(blob).name_items()
    nothing = [b""] * len(names)
    return Items(names, nothing, nothing, hashes=nothing)


def decode_results(blob: bytes, *, has_results: bool) -> Items:
    """Return the items of a chunk whose results are to be read: their keys and content hashes, and perhaps their texts.

    Behind a reference that has not kept them, since its chunk has not been encoded or was by an earlier release, they
    are read from the object. Raise StorageUnavailable, and ObjectChanged if the chunk `has_results`; without any, the
    items of an object that is another one now are named by their positions.
    """
    kept = _find_kept(blob) if is_reference(blob) else None
    if kept is not None:
        return kept
    try:
        return decode_payload(blob)
    except ObjectChanged:
        if has_results:
            raise
        return _name_items(blob)


def empty_items(blob: bytes, keys: Set[str]) -> tuple[bytes | None, int]:
    """Remove text and metadata of the items with these keys from a blob.

    Return the new blob and the number of items that were changed; the blob is None if there were none. A reference
    has no texts that could be removed.
    """
    if is_reference(blob):
        return None, 0
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


def split_payload(
    blob: bytes, places: Sequence[int] | None, middle: int, spec: EncodingSpec, num_tokens: int
) -> "list[PayloadPart]":
    """Return the payloads of the items before and from position `middle` on, of a chunk of about `num_tokens`."""
    if is_reference(blob):
        whole, kept = decode_reference(blob), _find_kept(blob)
        parts = []
        for start, stop in ((0, middle), (middle, whole.num_rows)):
            part = whole.take(start, stop).encode()
            if kept is not None:
                part = keep_keys(part, kept[start:stop]) or part
            parts.append(PayloadPart(part, stop - start, num_tokens * (stop - start) // whole.num_rows, None))
        return parts
    items, estimate = decode_payload(blob), TokenEstimate(spec)
    halves = items[:middle], items[middle:]
    cut_places = (None, None) if places is None else (places[:middle], places[middle:])
    return [
        PayloadPart(encode_payload(half), len(half), sum(map(estimate.of, half.texts)), own)
        for half, own in zip(halves, cut_places, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """The payload of one half of a split chunk, with the number of its items and an estimate of their tokens."""

    items: bytes
    num_items: int
    num_tokens: int
    places: Sequence[int] | None


def load_blob(connection: Connection, chunk_id: int) -> tuple[bytes, Sequence[int] | None]:
    """Return the payload of a chunk as stored, and the place of each item if they have places of their own.

    Raise PayloadGone if the pruner has removed it.
    """
    row = connection.execute(
        text("SELECT items, places FROM vectormill.chunk_payloads WHERE chunk_id = :chunk_id"),
        {"chunk_id": chunk_id},
    ).one_or_none()
    if row is None:
        raise _gone(chunk_id)
    return row.items, row.places


def open_payload(blob: bytes | None, chunk_id: int, places: Sequence[int] | None = None) -> Items:
    """Return the items of a chunk whose blob was read with its claim.

    Raise PayloadGone if there is no blob, and for a reference ObjectChanged and StorageUnavailable.
    """
    if blob is None:
        raise _gone(chunk_id)
    items = decode_payload(blob)
    if is_reference(blob):
        items = replace(items, reference=blob)
    return items if places is None else replace(items, places=places)


INSERT_ERRORS: Final = text("""
    INSERT INTO vectormill.item_errors (job_id, item, chunk_id, key, code, detail)
    SELECT :job_id, item, chunk_id, key, code, detail
      FROM unnest(CAST(:items AS bigint[]), CAST(:chunk_ids AS bigint[]), CAST(:keys AS text[]),
                  CAST(:codes AS text[]), CAST(:details AS text[])) AS failed (item, chunk_id, key, code, detail)
    ON CONFLICT (job_id, item) DO UPDATE SET code = excluded.code, detail = excluded.detail
""")


def insert_errors(
    connection: Connection, job_id: UUID, failed: Sequence[tuple[int, int, str, ItemFailure]]
) -> None:
    """Record why items of a job failed, each with its position in the job, its chunk and its key."""
    if failed:
        items, chunk_ids, keys, failures = map(list, zip(*failed, strict=True))
        values = {"job_id": job_id, "items": items, "chunk_ids": chunk_ids, "keys": keys}
        values["codes"] = [failure.code for failure in failures]
        values["details"] = [failure.detail for failure in failures]
        connection.execute(INSERT_ERRORS, values)


WRITE_PAYLOAD: Final = text("UPDATE vectormill.chunk_payloads SET items = :items WHERE chunk_id = :chunk_id")


def write_payload(connection: Connection, chunk_id: int, blob: bytes) -> None:
    """Replace the payload of a chunk by one with the same items."""
    connection.execute(WRITE_PAYLOAD, {"items": blob, "chunk_id": chunk_id})


def _gone(chunk_id: int) -> PayloadGone:
    return PayloadGone(
        f"The texts of chunk {chunk_id} no longer exist, because its job's retention has ended."
    )
