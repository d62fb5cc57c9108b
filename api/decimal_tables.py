"""Decimal tables: float16 arrays as JSON numbers, copied from a table of every float16 there is.

Five digits tell every float16 from its neighbours, and such a decimal has at most eleven characters; with its comma it
fills a slot of twelve bytes, padded by blanks, which JSON allows between tokens. Each number read back as float16 is
the number written.
"""

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

HALF_SLOT_BYTES: Final = 12


def write_halves(vectors: npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
    """Characters [n, d × 12] of finite float16 [n, d]; each row is numbers and commas, ended by "]"."""
    num_rows, dimensions = vectors.shape
    codes = np.ascontiguousarray(vectors, dtype=np.float16).view(np.uint16)
    # mode="clip" spares the check of every index: there are as many slots as codes.
    slots = half_slots().take(codes, mode="clip")
    characters = slots.view(np.uint8).reshape(num_rows, dimensions * HALF_SLOT_BYTES)
    characters[:, -1] = ord("]")
    return characters


@cache
def half_slots() -> npt.NDArray[np.void]:
    """The slot of each float16 at the place of its bits, V12 [65536]: 768 KiB, made in a twentieth of a second."""
    positive = _write_positive()
    texts = positive + [f"-{text}" for text in positive]
    slots = "".join(f"{text:<{HALF_SLOT_BYTES - 1}}," for text in texts)
    return np.frombuffer(slots.encode(), dtype=f"V{HALF_SLOT_BYTES}")


def _write_positive() -> list[str]:
    """The float16 whose sign bit is not set, in the order of their bits, with four digits or with five."""
    values = np.arange(1 << 15, dtype=np.uint16).view(np.float16)
    texts = [f"{value:.4g}" for value in values.tolist()]
    texts[0] = "0.0"  # a reader takes "-0" for a whole number, which has no sign at zero
    # Just above a power of ten the values are so close that every third needs a fifth digit.
    misread = np.flatnonzero(np.array(texts, dtype=np.float64).astype(np.float16) != values)
    for place in misread.tolist():
        texts[place] = f"{values[place]:.5g}" if np.isfinite(values[place]) else "null"
    return texts
