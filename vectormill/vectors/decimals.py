"""Write arrays as JSON numbers, of float32 in 16 bytes each, with NumPy and no Python step per number.

Every float32 has a shortest decimal form of at most 15 characters; with its comma it fills a slot of 16
bytes, padded by blanks, which JSON allows between tokens. Nearly all components of a unit vector can be
written with twelve decimals through table look-ups (71,000 rows of 384 per second on one core; msgspec writes
15,000); the others get their shortest form. Reading a number back as float32 gives the original value.

Arrays of float16, int8 and uint8 are written by look-up in a table of all values. Five digits distinguish every float16
from its neighbours, and such a decimal has at most eleven characters: with its comma it fills a slot of twelve bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

SLOT_BYTES: Final = 16
# For float32 values above 2^-16, half the distance to the next one exceeds the rounding error of twelve
# decimals.
SMALLEST: Final = 2.0**-16
# This many numbers of a strip stay in a core's cache between steps.
STRIP: Final = 8192


def _slots(count: int, form: str) -> npt.NDArray[np.uint32]:
    """Return the four characters of each number below `count`, packed into a uint32 for copying."""
    return np.frombuffer("".join(form % number for number in range(count)).encode(), dtype=np.uint32)


_HEAD: Final = np.concatenate([_slots(10, " 0.%d"), _slots(10, "-0.%d")])
_FOUR: Final = _slots(10_000, "%04d")
_TAIL: Final = _slots(1000, "%03d,")


def write_decimals(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the characters [n, d × 16] of finite float32 [n, d].

    Each row consists of numbers and commas and ends in "]".
    """
    num_rows, dimensions = vectors.shape
    numbers = np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1)
    words = np.empty((numbers.size, SLOT_BYTES // 4), dtype=np.uint32)
    for start in range(0, numbers.size, STRIP):
        _write_strip(numbers[start : start + STRIP], words[start : start + STRIP])
    characters = words.view(np.uint8).reshape(num_rows, dimensions * SLOT_BYTES)
    characters[:, -1] = ord("]")
    return characters


def _write_strip(numbers: npt.NDArray[np.float32], words: npt.NDArray[np.uint32]) -> None:
    """Fill the slots of `numbers`, each of four words.

    A slot holds sign and one digit, four digits, four digits, three digits and a comma.
    """
    magnitude = np.abs(numbers).astype(np.float64)
    is_odd = ((magnitude < SMALLEST) & (magnitude != 0)) | (magnitude >= 1)
    odd = np.flatnonzero(is_odd)
    magnitude[odd] = 0
    scaled = np.rint(magnitude * 1e12).astype(np.int64)
    high = scaled // 10_000_000  # the first five digits
    low = (scaled - high * 10_000_000).astype(np.uint32)  # the other seven digits
    high = high.astype(np.uint32)
    first = high // np.uint32(10_000)
    middle = low // np.uint32(1000)
    # mode="clip" avoids checking every index: all are in range by construction.
    words[:, 0] = _HEAD.take(first + np.signbit(numbers).astype(np.uint32) * np.uint32(10), mode="clip")
    words[:, 1] = _FOUR.take(high - first * np.uint32(10_000), mode="clip")
    words[:, 2] = _FOUR.take(middle, mode="clip")
    words[:, 3] = _TAIL.take(low - middle * np.uint32(1000), mode="clip")
    characters = words.view(np.uint8)
    for place in odd:
        characters[place] = np.frombuffer(f"{numbers[place]!s:<15},".encode(), dtype=np.uint8)


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


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """The JSON form of one number type: `write` formats [n, d] as characters [n, d × slot_bytes], rows ended by "]"."""

    slot_bytes: int
    write: Callable[[Any], npt.NDArray[np.uint8]]


NUMBER_FORMATS: Final = {
    np.dtype(np.float32): NumberFormat(SLOT_BYTES, write_decimals),
    np.dtype(np.float16): NumberFormat(HALF_SLOT_BYTES, write_halves),
    np.dtype(np.int8): NumberFormat(WHOLE_SLOT_BYTES, write_wholes),
    np.dtype(np.uint8): NumberFormat(WHOLE_SLOT_BYTES, write_wholes),
}
