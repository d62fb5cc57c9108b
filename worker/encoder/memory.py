"""Recognize out-of-memory errors of frameworks, and return freed memory to the system."""

import ctypes
import re
from typing import Final

from worker.devices.backends import BACKENDS

# CUDA and MPS raise torch.OutOfMemoryError. On a CPU torch raises RuntimeError, C++ code, openvino's too, raises
# std::bad_alloc, and backends have sentences of their own. oneDNN, which both use, says only what it could not create:
# primitives are made from descriptors that were found valid, so only memory can be missing then.
TYPES: Final = frozenset({"OutOfMemoryError", "MemoryError"})
SENTENCES: Final = (
    "cannot allocate memory",
    "bad_alloc",
    "bad allocation",
    "failed to allocate",
    *(sentence for backend in BACKENDS.values() for sentence in backend.memory_errors),
)
ONEDNN: Final = re.compile(r"could not create a (primitive|memory)\b(?! descriptor)")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error, or one that caused it, means that memory ran out."""
    seen: BaseException | None = error
    while seen is not None:
        if TYPES & {kind.__name__ for kind in type(seen).__mro__}:
            return True
        message = str(seen).lower()
        if isinstance(seen, RuntimeError) and (
            ONEDNN.search(message) or any(sentence in message for sentence in SENTENCES)
        ):
            return True
        seen = seen.__cause__
    return False


M_MMAP_THRESHOLD: Final = -3  # from glibc's malloc.h
LARGE_BLOCK_BYTES: Final = 1 << 20


def keep_large_blocks_apart() -> None:
    """Allocate each block of a megabyte or more with mmap, so that freeing it returns it to the system.

    glibc raises this threshold to the largest block that was freed, up to 32 MiB. Batch buffers, which are
    replaced by larger ones as batches grow, and the chunks that a Celery worker receives then leave holes in
    the heap that are never filled. For a process that allocates few such blocks per second this costs
    nothing; torch, which allocates new ones for every operation, would pay in page faults. Does nothing with
    another C library.
    """
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    except (AttributeError, OSError, TypeError):  # TypeError is raised on Windows, for None
        return
