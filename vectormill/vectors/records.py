"""Records: JSON of any length for each item of a chunk, kept as one compressed value."""

from collections.abc import Sequence
from typing import Final

import msgspec
import zstandard

COMPRESSION_LEVEL: Final = 3  # JSON repeats itself; a higher level takes longer than the commit
MAX_BYTES: Final = 1 << 30  # Postgres keeps no larger value

# JSON of each item; None for one that has none.
Records = list[bytes | None]

_DECODER: Final = msgspec.msgpack.Decoder(Records)


def pack_records(records: Sequence[bytes | None]) -> bytes:
    packed = msgspec.msgpack.encode(list(records))
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(packed)


def read_records(content: bytes | None, num_items: int) -> Records:
    """None for every item of a chunk that has no value yet."""
    if not content:
        return [None] * num_items
    return _DECODER.decode(zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_BYTES))
