"""A chunk's items as one compressed blob (claim check): messages carry the chunk's id, this table carries the texts."""

from collections.abc import Sequence, Set
from dataclasses import replace

import msgspec
import zstandard
from sqlalchemy import Connection, text

from vectormill.domain.errors import PayloadGone
from vectormill.jobs.item import Item, Items

# Level 1: on docstrings it compresses threefold at several hundred MB/s; higher levels only move the bottleneck here.
_COMPRESSION_LEVEL = 1
_MAX_PAYLOAD_BYTES = 1 << 30
_DECODER = msgspec.msgpack.Decoder(list[tuple[str, bytes, bytes]])
_NOTHING = msgspec.msgpack.encode(b"")


def encode_payload(items: Sequence[Item]) -> bytes:
    """The blob of `items`: zstd over MessagePack, in the order given."""
    columns = Items.of(items)
    rows = list(zip(columns.keys, columns.texts, columns.metadata, strict=True))
    return _compress(msgspec.msgpack.encode(rows))


def _compress(rows: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(rows)


def decode_payload(blob: bytes) -> Items:
    """The items of a blob made by `encode_payload`, as columns."""
    rows = zstandard.ZstdDecompressor().decompress(blob, max_output_size=_MAX_PAYLOAD_BYTES)
    decoded = _DECODER.decode(rows)
    return Items(*zip(*decoded, strict=True)) if decoded else Items((), (), ())


def read_keys(blob: bytes) -> list[str]:
    """The keys of a blob's items; their texts are passed over."""
    return [key for key, _, _ in _read_raw(blob)]


def empty_items(blob: bytes, keys: Set[str]) -> tuple[bytes | None, int]:
    """The blob without text and metadata of the items with these keys, and how many had any; None when none had."""
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
    """The items of a chunk. Raises PayloadGone when the pruner has removed them."""
    row = connection.execute(
        text("SELECT items, places FROM vectormill.chunk_payloads WHERE chunk_id = :chunk_id"),
        {"chunk_id": chunk_id},
    ).one_or_none()
    return open_payload(None, chunk_id) if row is None else open_payload(row.items, chunk_id, row.places)


def open_payload(blob: bytes | None, chunk_id: int, places: Sequence[int] | None = None) -> Items:
    """The items of a chunk whose blob was read with its claim. Raises PayloadGone when there is none."""
    if blob is None:
        raise PayloadGone(f"Chunk {chunk_id} has no texts any more; its job's retention has ended.")
    items = decode_payload(blob)
    return items if places is None else replace(items, places=places)
