"""The binary format of COPY, in which many rows are sent at once.

Source: PostgreSQL, "COPY", section "Binary Format". After a signature, flags and the length of an extension comes each
row: the number of fields in int16, then each field as its length in int32 and its bytes, with the length -1 for NULL.
At the end stands an int16 of -1.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Final

import numpy as np

# The bytes of a value in Postgres' binary format; None for NULL.
Field = bytes | None

_START: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END: Final = b"\xff\xff"
_NULL: Final = -1


def encode_rows(columns: Sequence[Sequence[Field]]) -> bytes:
    """Return the content of a binary COPY with these columns of equally many fields."""
    num_rows = len(columns[0])
    parts: list[Iterable[bytes]] = [repeat(len(columns).to_bytes(2), num_rows)]
    for fields in columns:
        values = [field or b"" for field in fields]
        lengths = np.fromiter(map(len, values), dtype=">i4", count=num_rows)
        if None in fields:
            lengths[[field is None for field in fields]] = _NULL
        parts += lengths.view("V4").tolist(), values
    return b"".join((_START, *chain.from_iterable(zip(*parts, strict=True)), _END))
