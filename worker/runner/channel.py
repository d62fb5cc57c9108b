"""Channel: one end of the pipe between a worker and a model process, and of the memory that the two share.

The pipe carries words, the memory carries arrays. A message is pickled without its arrays (PEP 574); these are written
into a block of the memory, and who receives the message reads them where they lie. The worker chooses the block of a
batch, and the results come back in it, so that no two batches have one: the worker writes in the first half and the
process in the second, which leaves a pass its inputs until it is forgotten. Results of a batch that was too large for a
block come through the pipe too.

The memory has no name and is each process's own: what a killed one leaves goes with it, and its successor has another.
A block that was being written when its process died is named by no message and read by nobody.
"""

import mmap
import os
import pickle
import struct
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# More than batches are with a process at a time, one a core of a large processor; a further one's arrays go through the
# pipe.
NUM_BLOCKS: Final = 96
# Bytes of address space: pages of a block that nobody has written to do not exist. Here lie 65,536 vectors of 1,024
# numbers, those of the largest batch of texts of 16 tokens, and their offsets; larger arrays go through the pipe.
HALF_BYTES: Final = 320 << 20
MEMORY_BYTES: Final = NUM_BLOCKS * 2 * HALF_BYTES
ALIGNED_BYTES: Final = 64

NO_BLOCK: Final = -1
HEADER: Final = struct.Struct("<iI")  # block, number of its arrays
BOUNDS: Final = struct.Struct("<QQ")  # of one array in its half


def make_memory() -> int:
    """Return a descriptor of memory for a Channel, to be inherited; an unlinked file without memfd."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("vectormill-batches")
    else:
        with TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, MEMORY_BYTES)
    return descriptor


class Channel:
    """One end of the pipe and of the memory. One thread receives; any may send."""

    def __init__(
        self, connection: "Connection[Any, Any]", memory_descriptor: int, *, is_worker: bool
    ) -> None:
        self.connection = connection
        self._memory = mmap.mmap(memory_descriptor, MEMORY_BYTES)
        self._sends_at, self._receives_at = (0, HALF_BYTES) if is_worker else (HALF_BYTES, 0)
        self._lock = threading.Lock()

    def send(self, message: object, block: int | None = None) -> None:
        """Send a message. Its arrays go into `block`, which must be free until the message is answered."""
        frame = None if block is None else self._lay_out(message, block)
        if frame is None:
            frame = HEADER.pack(NO_BLOCK, 0) + pickle.dumps(message, protocol=5)
        with self._lock:
            self.connection.send_bytes(frame)

    def receive(self, on_dropped: Callable[[int], None] | None = None) -> tuple[Any, int | None]:
        """Wait for the next message. Return it and the block with its arrays. `on_dropped` is called with the block
        when nobody holds any of them any more.
        """
        frame = memoryview(self.connection.recv_bytes())
        block, num_arrays = HEADER.unpack_from(frame)
        stream = frame[HEADER.size + num_arrays * BOUNDS.size :]
        if block == NO_BLOCK:
            return pickle.loads(stream), None  # noqa: S301 - from our own process
        half = self._find_half(block, self._receives_at)
        arrays = [
            half[start:end]
            for start, end in BOUNDS.iter_unpack(frame[HEADER.size : len(frame) - len(stream)])
        ]
        message = pickle.loads(stream, buffers=arrays)  # noqa: S301 - as above
        if on_dropped is not None:
            weakref.finalize(half, on_dropped, block).atexit = False
        return message, block

    def _lay_out(self, message: object, block: int) -> bytes | None:
        """Write the arrays into the block. Return the rest of the message; None if they exceed half of the block."""
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        bounds, start = [], 0
        for array in arrays:
            bounds.append((start, start + len(array)))
            start += -(-len(array) // ALIGNED_BYTES) * ALIGNED_BYTES
        if start > HALF_BYTES:
            return None
        half = self._find_half(block, self._sends_at)
        for array, (begin, end) in zip(arrays, bounds, strict=True):
            half[begin:end] = array  # lets go of the interpreter's lock for large ones
        return HEADER.pack(block, len(arrays)) + b"".join(BOUNDS.pack(*each) for each in bounds) + stream

    def _find_half(self, block: int, start: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._memory, np.uint8, HALF_BYTES, block * 2 * HALF_BYTES + start)
