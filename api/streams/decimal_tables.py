"""Decimal tables: write arrays of float16, int8 and uint8 as JSON numbers, by look-up in a table of all values.

Five digits distinguish every float16 from its neighbours, and such a decimal has at most eleven characters. With its
comma it fills a slot of twelve bytes, padded with blanks, which JSON allows between tokens. Each number, read as
float16, is exactly the number that was written.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

HALF_SLOT_BYTES: Final = 12
WHOLE_SLOT_BYTES: Final = 5


def write_halves(vectors: npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
    """Format finite float16 [n, d] as characters [n, d × 12]; each row is numbers with commas, ended by "]"."""
    num_rows, dimensions = vectors.shape
    codes = np.ascontiguousarray(vectors, dtype=np.float16).view(np.uint16)
    # mode="clip" skips the bounds check of every index, since there are as many slots as codes.
    slots = half_slots().take(codes, mode="clip")
    return _end_rows(slots, num_rows, dimensions * HALF_SLOT_BYTES)


def write_wholes(rows: npt.NDArray[np.int8] | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Format int8 or uint8 [n, width] as characters [n, width × 5]; each row is numbers with commas, ended by "]"."""
    num_rows, width = rows.shape
    codes = np.ascontiguousarray(rows).view(np.uint8)
    slots = whole_slots(rows.dtype.kind == "i").take(codes, mode="clip")
    return _end_rows(slots, num_rows, width * WHOLE_SLOT_BYTES)


def _end_rows(slots: npt.NDArray[np.void], num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    characters = slots.view(np.uint8).reshape(num_rows, row_bytes)
    characters[:, -1] = ord("]")
    return characters


@cache
def half_slots() -> npt.NDArray[np.void]:
    """Return the decimals of all float16 as slots of 12 bytes, V12 [65536], indexed by their bits.

    The table takes 768 KiB, and 50 ms to make.
    """
    positive = _write_positive()
    texts = positive + [f"-{text}" for text in positive]
    slots = "".join(f"{text:<{HALF_SLOT_BYTES - 1}}," for text in texts)
    return np.frombuffer(slots.encode(), dtype=f"V{HALF_SLOT_BYTES}")


def _write_positive() -> list[str]:
    """Return the decimals of all float16 without a sign bit, in the order of their bits, with four or five digits."""
    values = np.arange(1 << 15, dtype=np.uint16).view(np.float16)
    texts = [f"{value:.4g}" for value in values.tolist()]
    texts[0] = "0.0"  # readers parse "-0" as an integer, which loses the sign of zero
    # Just above a power of ten, values are so close that every third one needs a fifth digit.
    misread = np.flatnonzero(np.array(texts, dtype=np.float64).astype(np.float16) != values)
    for place in misread.tolist():
        texts[place] = f"{values[place]:.5g}" if np.isfinite(values[place]) else "null"
    return texts


@cache
def whole_slots(is_signed: bool) -> npt.NDArray[np.void]:
    """Return the decimals of all int8 or uint8 as slots of 5 bytes, V5 [256], indexed by their bits."""
    numbers = range(256) if not is_signed else (*range(128), *range(-128, 0))
    return np.frombuffer(
        "".join(f"{number:<4}," for number in numbers).encode(), dtype=f"V{WHOLE_SLOT_BYTES}"
    )
