"""The C library's allocator, as processes want it that do the same thing over and over. Frees nothing itself."""

import ctypes
from typing import Final

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
