"""Group, list and pack the records of extractions.

A record is a path of steps from a root type of the schema to a leaf. A job returns an item's records as a
list. A collection stores them grouped by the type that they begin with, as jsonb, so that `output ->
'person'` are the records of persons. With a chunk, the records of all its items are stored as one compressed value.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import zstandard

from vectormill.jobs.item import has_nul

COMPRESSION_LEVEL: Final = 3  # JSON is repetitive; a higher level takes longer than the commit
MAX_BYTES: Final = 1 << 30  # Postgres stores no larger value

# The JSON of each item; None for an item that has none.
Records = list[bytes | None]

Step = dict[str, Any]
Path = Annotated[list[Step], msgspec.Meta(min_length=1)]

_PATHS: Final = msgspec.json.Decoder(list[Path])
_GROUPED: Final = msgspec.json.Decoder(dict[str, list[msgspec.Raw]])

_DECODER: Final = msgspec.msgpack.Decoder(Records)


class UnstorableRecord(Exception):
    """The item's records cannot be stored in a collection; the message says why."""


def group_records(output: bytes) -> bytes:
    """Return an item's list of records grouped by the type that each begins with, in their given order.

    Raises UnstorableRecord for what jsonb would reject: NUL, half of a surrogate pair, or anything but a list
    of paths.
    """
    grouped: dict[str, list[Path]] = {}
    try:
        for path in _PATHS.decode(output):
            grouped.setdefault(path[0]["type"], []).append(path)
        encoded = msgspec.json.encode(grouped)
    except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError, TypeError) as error:
        raise UnstorableRecord(f"the records cannot be stored as JSON: {error}") from error
    if has_nul(encoded):
        raise UnstorableRecord("the records contain a NUL character (U+0000), which Postgres cannot store")
    return encoded


def list_records(grouped: bytes) -> bytes:
    """Return grouped records as a list again, type by type in the order of their code points."""
    by_type = _GROUPED.decode(grouped)
    return msgspec.json.encode([path for name in sorted(by_type) for path in by_type[name]])


def pack_records(records: Sequence[bytes | None]) -> bytes:
    packed = msgspec.msgpack.encode(list(records))
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(packed)


def read_records(content: bytes | None, num_items: int) -> Records:
    """Return the records of a chunk as JSON per item; all None while the chunk has no value yet."""
    if not content:
        return [None] * num_items
    return _DECODER.decode(zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_BYTES))
