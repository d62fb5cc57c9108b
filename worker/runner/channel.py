"""Channel is one end of the pipe and of the shared memory between a worker and a model process.

Messages go through the pipe and arrays through the memory. A message is pickled without its arrays (PEP 574);
these are written into a block of the memory, and the receiver reads them there without copying. The worker
chooses the block of a batch, and the results come back in the same block, so no two batches share one. The
worker writes in the first half and the process in the second, so a forward pass keeps its inputs until the
batch is forgotten. Results that are too large for a block come through the pipe.

The memory has no name and belongs to one process: if the process is killed, its memory goes with it, and the
next process gets another. A block that was being written when its process died is named by no message and
read by nobody.
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

# More blocks than batches are with a process at a time, which is one for each core of a large processor. The
# arrays of a further batch go through the pipe.
NUM_BLOCKS: Final = 96
# The size of a block in bytes of address space; pages that nobody has written to take no memory. A block
# holds 65,536 vectors of 1,024 numbers, those of the largest batch of texts of 16 tokens, and their offsets;
# larger arrays go through the pipe.
HALF_BYTES: Final = 320 << 20
MEMORY_BYTES: Final = NUM_BLOCKS * 2 * HALF_BYTES
ALIGNED_BYTES: Final = 64

NO_BLOCK: Final = -1
HEADER: Final = struct.Struct("<iI")  # block, and the number of its arrays
BOUNDS: Final = struct.Struct("<QQ")  # begin and end of one array in its half of the block


def make_memory() -> int:
    """Create memory for a Channel. Return its file descriptor, which a child inherits.

    Without memfd, the memory is an unlinked file.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("vectormill-batches")
    else:
        with TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, MEMORY_BYTES)
    return descriptor


class Channel:
    """One end of the pipe and of the shared memory. One thread receives; any thread may send."""

    def __init__(
        self, connection: "Connection[Any, Any]", memory_descriptor: int, *, is_worker: bool
    ) -> None:
        self.connection = connection
        self._memory = mmap.mmap(memory_descriptor, MEMORY_BYTES)
        self._sends_at, self._receives_at = (0, HALF_BYTES) if is_worker else (HALF_BYTES, 0)
        self._lock = threading.Lock()

    def send(self, message: object, block: int | None = None) -> None:
        """Send a message.

        Its arrays are written to `block`, which must stay unused until the answer arrives.
        """
        frame = None if block is None else self._lay_out(message, block)
        if frame is None:
            frame = HEADER.pack(NO_BLOCK, 0) + pickle.dumps(message, protocol=5)
        with self._lock:
            self.connection.send_bytes(frame)

    def receive(self, on_dropped: Callable[[int], None] | None = None) -> tuple[Any, int | None]:
        """Wait for the next message.

        Return it with the block that holds its arrays, or None if no block does. `on_dropped` is called with
        the block when no reference to any of the arrays is left.
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
        """Write the arrays into the block.

        Return the rest of the message, or None if half a block is too small.
        """
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
            half[begin:end] = array  # numpy releases the GIL for large arrays
        return HEADER.pack(block, len(arrays)) + b"".join(BOUNDS.pack(*each) for each in bounds) + stream

    def _find_half(self, block: int, start: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._memory, np.uint8, HALF_BYTES, block * 2 * HALF_BYTES + start)
