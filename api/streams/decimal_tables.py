"""Decimal tables: arrays of float16, int8 and uint8 as JSON numbers, copied from a table of every number there is.

Five digits tell every float16 from its neighbours, and such a decimal has at most eleven characters; with its comma it
fills a slot of twelve bytes, padded by blanks, which JSON allows between tokens. Each number read back as float16 is
the number written.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

HALF_SLOT_BYTES: Final = 12
WHOLE_SLOT_BYTES: Final = 5


def write_halves(vectors: npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
    """Return characters [n, d × 12] of finite float16 [n, d]; each row is numbers and commas, ended by "]"."""
    num_rows, dimensions = vectors.shape
    codes = np.ascontiguousarray(vectors, dtype=np.float16).view(np.uint16)
    # mode="clip" spares the check of every index: there are as many slots as codes.
    slots = half_slots().take(codes, mode="clip")
    return _end_rows(slots, num_rows, dimensions * HALF_SLOT_BYTES)


def write_wholes(rows: npt.NDArray[np.int8] | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return characters [n, width × 5] of int8 or uint8 [n, width]; each row is numbers and commas, ended by "]"."""
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
    """Return the slot of each float16 at the place of its bits, V12 [65536]: 768 KiB, made in 50 ms."""
    positive = _write_positive()
    texts = positive + [f"-{text}" for text in positive]
    slots = "".join(f"{text:<{HALF_SLOT_BYTES - 1}}," for text in texts)
    return np.frombuffer(slots.encode(), dtype=f"V{HALF_SLOT_BYTES}")


def _write_positive() -> list[str]:
    """Write the float16 whose sign bit is not set, in the order of their bits, with four digits or with five."""
    values = np.arange(1 << 15, dtype=np.uint16).view(np.float16)
    texts = [f"{value:.4g}" for value in values.tolist()]
    texts[0] = "0.0"  # a reader takes "-0" for a whole number, which has no sign at zero
    # Just above a power of ten the values are so close that every third needs a fifth digit.
    misread = np.flatnonzero(np.array(texts, dtype=np.float64).astype(np.float16) != values)
    for place in misread.tolist():
        texts[place] = f"{values[place]:.5g}" if np.isfinite(values[place]) else "null"
    return texts


@cache
def whole_slots(is_signed: bool) -> npt.NDArray[np.void]:
    """Return the slot of each number of eight bits at the place of its bits, V5 [256]."""
    numbers = range(256) if not is_signed else (*range(128), *range(-128, 0))
    return np.frombuffer(
        "".join(f"{number:<4}," for number in numbers).encode(), dtype=f"V{WHOLE_SLOT_BYTES}"
    )
