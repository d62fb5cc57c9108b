"""NDJSON: encode items as lines of JSON in blocks for a stream, and compress blocks."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NotRequired, TypedDict

import msgspec

PART_BYTES: Final = 256 << 10
# msgspec is ten times as fast as the standard library's encoder, which would be the slowest part of a large upload.
_ENCODER: Final = msgspec.json.Encoder()


class ItemJson(TypedDict):
    """One item as a client sends it to the API."""

    key: str
    text: str
    text_pair: NotRequired[str]
    metadata: NotRequired[Mapping[str, Any] | msgspec.Raw]


def encode_line(item: Mapping[str, object]) -> bytes:
    """Encode an item as one line of NDJSON. A lone surrogate is escaped, and the API reports that item as an error."""
    try:
        return _ENCODER.encode(item) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(item, separators=(",", ":"), default=msgspec.json.decode).encode() + b"\n"


def encode_parts(items: Iterable[ItemJson], part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Yield the items as NDJSON in blocks of about `part_bytes`, so that sending them takes few system calls."""
    lines: list[bytes] = []
    num_bytes = 0
    for item in items:
        line = encode_line(item)
        lines.append(line)
        num_bytes += len(line)
        if num_bytes >= part_bytes:
            yield b"".join(lines)
            lines.clear()
            num_bytes = 0
    if lines:
        yield b"".join(lines)


def compress_parts(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Compress the blocks into one gzip stream. Level 1 compresses some 100 MB/s, faster than most networks."""
    compressor = make_compressor()
    for part in parts:
        if compressed := compressor.compress(part):
            yield compressed
    yield compressor.flush()


def make_compressor() -> "zlib._Compress":
    return zlib.compressobj(level=1, wbits=31)  # 31 means the gzip format, without a name or a time
