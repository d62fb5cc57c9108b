"""A chunk's items as one compressed blob (claim check): messages carry the chunk's id, this table carries the texts."""

from collections.abc import Sequence

import msgspec
import zstandard
from sqlalchemy import Connection, text

from vectormill.domain.errors import PayloadGone
from vectormill.domain.item import Item

# Level 1: on docstrings it compresses threefold at several hundred MB/s; higher levels only move the bottleneck here.
_COMPRESSION_LEVEL = 1
_MAX_PAYLOAD_BYTES = 1 << 30


def encode_payload(items: Sequence[Item]) -> bytes:
    """The blob of `items`: zstd over MessagePack, in the order given."""
    rows = [(item.key, item.text, item.metadata) for item in items]
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(msgspec.msgpack.encode(rows))


def decode_payload(blob: bytes) -> list[Item]:
    """The items of a blob made by `encode_payload`."""
    rows = zstandard.ZstdDecompressor().decompress(blob, max_output_size=_MAX_PAYLOAD_BYTES)
    return [Item(*row) for row in msgspec.msgpack.decode(rows, type=list[tuple[str, bytes, bytes]])]


def load_payload(connection: Connection, chunk_id: int) -> list[Item]:
    """The items of a chunk. Raises PayloadGone when the pruner has removed them."""
    blob = connection.execute(
        text("SELECT items FROM vectormill.chunk_payloads WHERE chunk_id = :chunk_id"), {"chunk_id": chunk_id}
    ).scalar_one_or_none()
    if blob is None:
        raise PayloadGone(f"Chunk {chunk_id} has no texts any more; its job's retention has ended.")
    return decode_payload(blob)
