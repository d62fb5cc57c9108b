"""What is foreseen of memory, compared with what processes take that really run the packaged model with torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.children.gauged import Reading
from benchmarks.placed import PlacedModel, plan_replica
from tests.models import read_card
from tests.rank_processes import find_two
from tests.rexuninlu import write_wide
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import CPU
from worker.encoder.choice import FP32
from worker.placement.footprint import make_footprint
from worker.placement.placement import Shard
from worker.placement.strategies import FULLY_SHARDED, PIPELINE
from worker.runner.starter import Sharing

MEASURE = """
import sys
import numpy as np
from pathlib import Path
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import Choice, EncoderOrder
from worker.model.torch_encoder import TorchEncoder

def read_status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

card = Registry({}).card(DEFAULT_MODEL, weights=True)
order = EncoderOrder(card, split_processor(detect_inventory(), 1)[0], "torch", "fp32", 2, Path("."))
choice = Choice("fp32", "")
encoder = TorchEncoder(order, Choice("torch", ""), choice)
encoder.encode(Batch.from_ids([np.arange(5, 13, dtype=np.int32)] * 2))
for shape in sys.argv[1:]:
    num_sequences, length = map(int, shape.split("x"))
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    # One sequence is shorter, so that there is padding and with it a mask.
    rows = [np.arange(5, 5 + length - (row == 0), dtype=np.int32) for row in range(num_sequences)]
    encoder.encode(Batch.from_ids(rows))
    print("grown", read_status("VmHWM") - before, encoder.describe().attention)
"""


# As MEASURE, of an extraction.
MEASURE_EXTRACTION = """
import sys
import numpy as np
from pathlib import Path
from tests.models import read_card
from vectormill.ragged import Ragged
from worker.batching.batch import TOKEN_INPUTS, Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import split_processor
from worker.encoder.encoder import EncoderOrder
from worker.tasks.extract.model.encoder import RexEncoder

def read_status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def make_batch(num_sequences, length):
    rows = [np.arange(length - (row == 0), dtype=np.int32) for row in range(num_sequences)]
    values = {name: [np.zeros_like(row) for row in rows] for name in TOKEN_INPUTS if name != "word_marks"}
    # A quarter of it is a hint of types of four tokens.
    values |= {"input_ids": [5 + row % 500 for row in rows], "position_ids": rows}
    values["token_type_ids"] = [(row >= length // 4).astype(np.int32) for row in rows]
    values["type_segments"] = [np.where(row < length // 4, 1 + row // 4, 0).astype(np.int32) for row in rows]
    return Batch({name: Ragged.from_rows(each, np.int32) for name, each in values.items()})

device = split_processor(detect_inventory(), 1)[0]
encoder = RexEncoder(EncoderOrder(read_card(Path(sys.argv[1])), device, "torch", "fp32", 2, Path(".")))
encoder.encode(make_batch(2, 8))
for shape in sys.argv[2:]:
    num_sequences, length = map(int, shape.split("x"))
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    encoder.encode(make_batch(num_sequences, length))
    print("grown", read_status("VmHWM") - before, encoder.describe().attention)
"""


SHAPES = [(16, 128), (64, 64), (32, 512)]
# Where all heads are at work at once, where the feed-forward block takes most, and where a few heads are at work.
EXTRACTED_SHAPES = [(16, 128), (64, 64), (4, 512)]


Measured = dict[tuple[int, int], tuple[int, str]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return measure(MEASURE, SHAPES)


def measure(program: str, shapes: list[tuple[int, int]], *arguments: str) -> Measured:
    """By shape: by how much the process grew, and the name of the attention. One process, the smallest batch first."""
    # An allocator that gives memory back: by default glibc keeps up to a third of the peak for itself, and differs from
    # run to run. With this threshold what is measured are the tensors that were alive together.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, *arguments),
            *(f"{num_sequences}x{length}" for num_sequences, length in shapes),
        ],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("grown")]
    return {
        shape: (int(grown), attention) for shape, (_, grown, attention) in zip(shapes, lines, strict=True)
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_prediction_is_near_what_a_process_really_takes(
    shape: tuple[int, int], measured: Measured
) -> None:
    grown, attention = measured[shape]
    footprint = make_footprint(Registry({}).card(DEFAULT_MODEL, weights=True).find_shape(), "fp32", attention)
    predicted = footprint.predict_batch_bytes(*shape)
    weights = footprint.weight_bytes
    assert abs(predicted - grown) / (weights + grown) < 0.15, (predicted, grown)


def test_the_prediction_is_near_what_an_extraction_really_takes(tmp_path: Path) -> None:
    directory = write_wide(tmp_path / "rexuninlu")
    shape = read_card(directory).find_shape()
    for sizes, (grown, attention) in measure(MEASURE_EXTRACTION, EXTRACTED_SHAPES, str(directory)).items():
        footprint = make_footprint(shape, "fp32", attention)
        predicted = footprint.predict_batch_bytes(*sizes)
        assert abs(predicted - grown) / (footprint.weight_bytes + grown) < 0.15, (sizes, predicted, grown)


@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,  # hidden states wait and leave
        # The vocabulary, half of this model, is gathered for a moment.
        pytest.param(FULLY_SHARDED, marks=pytest.mark.slow),
    ],
)
def test_what_the_plan_counts_for_a_rank_is_near_what_it_really_takes(strategy: str) -> None:
    for shard, reading in measure_ranks(CPU, strategy, 1024):
        foreseen = shard.weight_bytes + shard.activation_bytes
        most = reading.peak_bytes - reading.before_bytes
        # Pages of libraries' code are counted or not: how many are mapped is the kernel's choice, not the model's.
        taken = min(max(foreseen, most - reading.file_bytes), most)
        assert abs(foreseen / taken - 1) < 0.15, (shard, reading)


def measure_ranks(kind: str, strategy: str, batch_tokens: int) -> list[tuple[Shard, Reading]]:
    """What is foreseen for each of two ranks, and what it has taken, with batches as large as the plan allows."""
    _, devices = find_two(kind)
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    replica = plan_replica(card, devices, FP32, strategy, 128, batch_tokens)
    # Every eighth is shorter, so that there is padding, and with it a mask.
    texts = [
        np.arange(1000, 1128 - (place % 8 == 7), dtype=np.int32)
        for place in range(replica.max_batch_tokens // 128)
    ]
    giving_back = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # as above
    with PlacedModel(Sharing(replica, devices), card, FP32, environment=giving_back) as system:
        for _ in range(2):  # what a kernel makes once for all is foreseen with every batch
            system.encode(texts, replica.max_batch_tokens)
        readings = system.readings()
    shards = [shard for stage in replica.stages for shard in stage.shards]
    assert len(shards) == 2
    return list(zip(shards, readings, strict=True))
