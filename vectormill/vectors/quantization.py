"""Quantize float32 vectors to int8 codes or to one bit per value, as sentence-transformers defines both.

Source: sentence_transformers.util.quantization.quantize_embeddings, precisions "int8" and "ubinary".
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

# A code is a step of 1/255 of its dimension's range.
NUM_STEPS: Final = 255
SMALLEST_CODE: Final = -128


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges of int8 codes in a vector space: each dimension's lowest and highest value, float32 [d]."""

    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]

    @property
    def steps(self) -> npt.NDArray[np.float32]:
        """Return the size of a step, float32 [d]; 1 if all values are equal, to avoid a division by zero."""
        steps = (self.high - self.low) / np.float32(NUM_STEPS)
        return np.where(steps == 0, np.float32(1), steps)

    @property
    def offsets(self) -> npt.NDArray[np.float32]:
        """Return the value that code 0 stands for, float32 [d]: the middle of its step."""
        return self.low + np.float32(0.5 - SMALLEST_CODE) * self.steps

    def to_bytes(self) -> bytes:
        return np.stack([self.low, self.high]).astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        low, high = np.frombuffer(content, dtype="<f4").astype(np.float32).reshape(2, -1)
        return cls(low, high)


def measure_ranges(vectors: npt.NDArray[np.float32]) -> Ranges:
    """Return the ranges of a sample of vectors, float32 [n, d]."""
    return Ranges(vectors.min(axis=0), vectors.max(axis=0))


def widen_ranges(ranges: Ranges, share: float) -> Ranges:
    """Return the ranges widened at either end by `share` of their length."""
    margin = np.float32(share) * (ranges.high - ranges.low)
    return Ranges(ranges.low - margin, ranges.high + margin)


def quantize(vectors: npt.NDArray[np.float32], ranges: Ranges) -> npt.NDArray[np.int8]:
    """Return int8 codes [n, d] of finite float32 [n, d]; values outside the ranges get the end's code."""
    steps = np.floor((vectors - ranges.low) / ranges.steps)
    codes: npt.NDArray[np.int8] = (np.clip(steps, 0, NUM_STEPS) + SMALLEST_CODE).astype(np.int8)
    return codes


def restore(codes: npt.NDArray[np.int8], ranges: Ranges) -> npt.NDArray[np.float32]:
    """Return float32 [n, d]: the middle of the step that each code stands for."""
    return codes.astype(np.float32) * ranges.steps + ranges.offsets


def pack_signs(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return one bit per value, set if it is above 0: uint8 [n, d / 8 rounded up].

    The first value is in the highest bit.
    """
    return np.packbits(vectors > 0, axis=-1)
