"""Exhaustion: whether what a framework raised means that memory was short. Imports none of the frameworks."""

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
