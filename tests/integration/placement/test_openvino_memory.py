"""What a model process with openvino keeps in memory, read from the kernel's account of it."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import DEVICE, packaged_model
from vectormill.models.layouts import read_model_card
from worker.encoder.encoder import EncoderOrder
from worker.openvino.conversion import find_or_convert
from worker.openvino.encoder import BufferWatch

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells"),
]

MEBIBYTE = 1 << 20
# In a process of its own: this one has loaded torch.
PROGRAM = """
import pickle, sys
from pathlib import Path
import numpy as np
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.openvino.network import MappedWeights

def count_resident_kilobytes(name):
    kilobytes, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_inside = line.endswith(name)
        elif is_inside and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes

if sys.argv[1] == "keep":
    MappedWeights.forget = lambda weights: None
encoder = load_encoder(pickle.loads(sys.stdin.buffer.read()))
loaded = count_resident_kilobytes("network.bin")
batch = Batch.from_ids([np.array([101, 2023, 2003, 102], dtype=np.int32)])
first = encoder.encode(batch).matrix
assert np.array_equal(first, encoder.encode(batch).matrix)
print(loaded, "openvino.tools.ovc" in sys.modules, "torch" in sys.modules)
"""

RELEASING = """
import pickle, sys, threading
import numpy as np
import psutil
from worker.batching.batch import Batch
from worker.openvino import encoder as openvino_buffers
from worker.openvino import encoder as openvino_encoder
from worker.encoder.backends import load_encoder

def make_batch(count, length):
    return Batch.from_ids([np.arange(1000, 1000 + length, dtype=np.int32)] * count)

openvino_encoder.FORGET_SECONDS = 0.0
openvino_buffers.RELEASE_SECONDS = float(sys.argv[1])
encoder = load_encoder(pickle.loads(sys.stdin.buffer.read()))
small, large = make_batch(2, 64), make_batch(32, 256)
before = encoder.encode(small).matrix
encoder.encode(large)
taken = psutil.Process().memory_info().rss

def encode_both():
    for _ in range(8):
        assert np.array_equal(before, encoder.encode(small).matrix)
    ended.append(True)

ended = []
threads = [threading.Thread(target=encode_both) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(ended) == 2
print(taken, psutil.Process().memory_info().rss)
"""


def test_of_a_loaded_model_nothing_is_resident_beside_its_packed_weights(
    new_cache_dir: Callable[[], Path],
) -> None:
    card = read_model_card("packaged", packaged_model())
    order = EncoderOrder(card, DEVICE, "openvino", "fp32", DEVICE.num_threads, new_cache_dir())
    folder = find_or_convert(order, "fp32")
    # Words are read by row (tests/unit/openvino/test_memory.py), and are half of this model.
    assert (folder / "words.bin").stat().st_size == 30522 * 384 * 4
    assert (folder / "network.bin").stat().st_size > 40 * MEBIBYTE
    loaded_kilobytes = {}
    for habit in ("forget", "keep"):
        loaded, has_converter, has_torch = run_program(PROGRAM, habit, order)
        assert (has_converter, has_torch) == ("False", "False")
        loaded_kilobytes[habit] = int(loaded)
    assert loaded_kilobytes["forget"] < 1024
    assert loaded_kilobytes["keep"] > 32 * 1024, "openvino keeps resident what it has read"


def test_the_buffers_of_batches_that_have_become_small_are_given_back(
    new_cache_dir: Callable[[], Path],
) -> None:
    order = EncoderOrder(
        read_model_card("packaged", packaged_model()), DEVICE, "openvino", "fp32", 2, new_cache_dir()
    )
    given_back = {}
    for release_seconds in ("0", "1000"):
        taken, left = map(int, run_program(RELEASING, release_seconds, order))
        given_back[release_seconds] = taken - left
    # 8,192 tokens, each with some 20 KiB of activations.
    assert given_back["0"] > 64 * MEBIBYTE
    assert given_back["1000"] < 16 * MEBIBYTE


def test_buffers_are_kept_as_long_as_some_batches_want_half_of_them() -> None:
    watch = BufferWatch()
    sizes = [4096, 2100, 100, 100, 100, 100]
    moments = [0.0, 5.0, 11.0, 12.0, 22.0, 33.0]
    told = [watch.note(size, moment) for size, moment in zip(sizes, moments, strict=True)]
    assert told == [False, False, False, False, True, False]


def run_program(program: str, argument: str, order: EncoderOrder) -> list[str]:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, argument], input=pickle.dumps(order), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()
