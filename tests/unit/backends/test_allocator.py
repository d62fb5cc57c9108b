"""Blocks that are freed go back to the system. Measured in a process of its own: the setting lasts."""

import platform
import subprocess
import sys

import pytest

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

    # Of the 64 MiB in large blocks; what else the process gives and takes meanwhile is of a MiB or so.
    assert measure("as it comes") < 32
    assert measure("apart") > 56
