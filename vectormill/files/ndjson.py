"""NDJSON: items as lines of JSON, in parts fit for a stream, and lines out of a stream's parts.

Knows nothing of files or of HTTP.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NotRequired, TypedDict

import msgspec

PART_BYTES: Final = 256 << 10
# Ten times as fast as the standard library's, which would be the slowest part of a large upload.
_ENCODER: Final = msgspec.json.Encoder()


class ItemJson(TypedDict):
    """One item as it goes over the wire."""

    key: str
    text: str
    text_pair: NotRequired[str]
    metadata: NotRequired[Mapping[str, Any]]


def encode_line(item: Mapping[str, object]) -> bytes:
    """Return one line of NDJSON. A lone surrogate has no UTF-8: it travels escaped, and the API reports the item."""
    try:
        return _ENCODER.encode(item) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(item, separators=(",", ":")).encode() + b"\n"


def encode_parts(items: Iterable[ItemJson], part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Yield the items as NDJSON, in parts of about `part_bytes`, so that a stream takes few system calls."""
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
    """Yield the parts as one gzip stream. Level 1 compresses some 100 MB/s, more than most networks take."""
    compressor = make_compressor()
    for part in parts:
        if compressed := compressor.compress(part):
            yield compressed
    yield compressor.flush()


def make_compressor() -> "zlib._Compress":
    return zlib.compressobj(level=1, wbits=31)  # 31: gzip, without a name or a time


def split_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their newline. Only \\n ends a line: a key may hold U+2028, where str.splitlines cuts."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    if rest:
        yield rest
