"""Which errors mean that memory was short, and blocks that go back to the system when they are freed."""

import platform
import subprocess
import sys

import numpy as np
import pytest

from worker.encoder.memory import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As torch's own: recognized by its name, because torch is not imported."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("Exception from src/inference/src/cpp/infer_request.cpp:223:\nstd::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("could not create a primitive"), True),  # oneDNN in torch, where bf16 has kernels made
        (RuntimeError("could not create a memory object"), True),
        (
            RuntimeError(
                "Exception from src/plugins/intel_cpu/src/node.cpp:823:\n[CPU] MVN node can't alloc"
            ),
            True,
        ),
        # No such kernel.
        (RuntimeError("could not create a primitive descriptor for the matmul primitive"), False),
        (MemoryError(), True),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
        # Words of the input, not of the framework.
        (ValueError("a text about a machine that ran out of memory"), False),
    ],
)
def test_an_error_that_means_too_little_memory_is_told_from_all_others(
    error: Exception, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


def test_an_array_that_numpy_cannot_allocate_is_out_of_memory() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 50)
    assert is_out_of_memory(caught.value)


def test_the_consequence_of_an_out_of_memory_is_one_too() -> None:
    error = RuntimeError("the graph could not be captured")
    error.__cause__ = OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(error)


PROGRAM = """
import ctypes, re, sys
from pathlib import Path
from worker.encoder.memory import keep_large_blocks_apart

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "apart":
    keep_large_blocks_apart()
libc.free(libc.malloc(30 << 20))  # from now on glibc would keep blocks up to this size in the heap
blocks = []
for _ in range(8):
    blocks.append(libc.malloc(8 << 20))
    ctypes.memset(blocks[-1], 1, 8 << 20)
    blocks.append(libc.malloc(900_000))  # keeps the heap from shrinking
full = resident()
for block in blocks[::2]:
    libc.free(block)
print((full - resident()) >> 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep other rules")
def test_large_blocks_between_small_ones_go_back_to_the_system() -> None:
    def measure(mode: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    # This counts the 64 MiB in large blocks; other allocations of the process meanwhile are about 1 MiB.
    assert measure("as it comes") < 32
    assert measure("apart") > 56
