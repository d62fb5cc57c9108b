"""Buffers: memory of large inputs, used again from batch to batch, and when it had better be made anew.

Knows no framework. A new block of a megabyte or more is mapped, filled with zeros by the kernel page by page, and
unmapped: 0.6 ms for a batch of 1,024 tokens, more than it takes to fill.
"""

import math
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

RELEASE_SECONDS: Final = 10.0


class Buffers:
    """Lends arrays of fp32; keeps as many as it is told. Used by any thread."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._spare: list[NDArray[np.float32]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Lend an array [*shape] of unknown content, part of a flat array that may be larger: its `base`."""
        size = math.prod(shape)
        with self._lock:
            found = next((place for place, spare in enumerate(self._spare) if spare.size >= size), None)
            if found is not None:
                buffer = self._spare.pop(found)
            else:
                del self._spare[:1]  # one that is too small makes room for it
                buffer = np.empty(size, dtype=np.float32)
        return buffer[:size].reshape(shape)

    def give_back(self, taken: NDArray[np.float32]) -> None:
        """Take back a lent array that nobody reads any more."""
        base = taken
        while isinstance(base.base, np.ndarray):
            base = base.base
        with self._lock:
            if len(self._spare) < self._num_kept:
                self._spare.append(base)

    def release(self) -> None:
        """Give everything that is not lent back to the system."""
        with self._lock:
            self._spare.clear()


class BufferWatch:
    """Tells when buffers, which are as large as the largest batch wanted them, had better be made anew.

    Sizes of batches are in tokens. Used by several threads: what one of them misses is a batch among many.
    """

    def __init__(self) -> None:
        self._kept_tokens = 0  # that the buffers are made for
        self._recent_tokens = 0  # of the largest batch since the last look
        self._look_at = 0.0

    def note(self, num_tokens: int, now: float) -> bool:
        """Return True now and then, if no recent batch has needed half of the buffers."""
        self._recent_tokens = max(self._recent_tokens, num_tokens)
        self._kept_tokens = max(self._kept_tokens, num_tokens)
        if now < self._look_at:
            return False
        is_too_large = self._recent_tokens * 2 <= self._kept_tokens
        if is_too_large:
            self._kept_tokens = self._recent_tokens
        self._recent_tokens = 0
        self._look_at = now + RELEASE_SECONDS
        return is_too_large
