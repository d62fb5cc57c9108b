"""MappedWeights: a file of weights as memory, which the kernel reads in where it is touched. Knows no framework."""

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class MappedWeights:
    """The bytes of a file. Whoever computes with them keeps this object for as long."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Nobody writes there, but openvino takes no array that says so.
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)

    def forget(self) -> None:
        """Release the pages that were read so far. They return from the kernel's cache when they are touched.

        Where the system cannot, nothing happens.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)
