"""The memory of processes that compute: errors that mean it was short, and what the C library keeps of it."""

import ctypes
import re
from typing import Final

# torch.OutOfMemoryError is what CUDA and MPS raise. On a CPU torch raises RuntimeError with "DefaultCPUAllocator: can't
# allocate memory"; C++ underneath, openvino's too, std::bad_alloc; cuBLAS and cuDNN have a status of their own, and
# openvino says of a layer that it "can't alloc". oneDNN, which both use, says only what it could not do: a primitive is
# made of a descriptor that was found to be sound, so that only memory can be missing then.
TYPES: Final = frozenset({"OutOfMemoryError", "MemoryError"})
SENTENCES: Final = (
    "can't alloc",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
    "alloc_failed",
    "failed to allocate",
)


ONEDNN: Final = re.compile(r"could not create a (primitive|memory)\b(?! descriptor)")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error, or one that caused it, means too little memory."""
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


M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
LARGE_BLOCK_BYTES: Final = 1 << 20


def keep_large_blocks_apart() -> None:
    """Have each block of a megabyte or more mapped alone, so that it goes back to the system when it is freed.

    glibc raises that bound to the largest block that was freed, up to 32 MiB. Buffers of batches, which are replaced by
    larger ones as batches grow, and a Celery worker's chunks on their way then leave holes in the heap that nothing
    fills again. For who takes few such blocks a second this costs nothing; torch, which takes new ones for every
    operation, would pay in page faults. Where the C library is another one, nothing happens.
    """
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
    except (AttributeError, OSError, TypeError):  # TypeError: what Windows says to None
        return
