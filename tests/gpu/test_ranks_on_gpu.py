"""A model that one device shares with nobody: all that a rank does on a GPU, with one GPU. NCCL has nobody to talk to.

Rows for the CPU run the same code with gloo and the exact kernel. Ranks on two GPUs: test_engine_on_gpu.py.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.gpu.devices import NEEDS_GPU
from worker.placement.strategies import OFFLOAD, SHARED

CASES: Final = [
    ("cpu", "packed"),
    pytest.param("cuda", "padded", marks=NEEDS_GPU),
    pytest.param("cuda", "auto", marks=NEEDS_GPU),
]
PROGRAM: Final = """
import sys
from pathlib import Path

import numpy as np

from tests.contract.rank_program import batches
from tests.gpu.devices import find_device
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import EncoderOrder
from worker.placement.placement import Rank

kind, strategy, attention, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
card, device = Registry({}).card(DEFAULT_MODEL, weights=True), find_device(kind)
is_cuda = kind == "cuda"
rank = Rank(0, 1, strategy, (6,), folder / "store", 60.0, 6 if strategy == "offload" else 0)
precision = "bf16" if is_cuda else "fp32"
order = EncoderOrder(card, device, "torch", precision, 1, folder, attention, rank)
shard = load_encoder(order)
report = shard.describe()
assert report.is_packed == (attention != "padded"), report
assert report.is_queued == is_cuda, report
passes = [shard.prepare(batch) for batch in batches()]  # as a rank does that queues: all at once
for each in passes:
    each.start()
found = np.concatenate([each.results().matrix for each in passes])
alone = load_encoder(EncoderOrder(card, find_device("cpu"), "torch", "fp32", 1, folder, "padded"))
expected = np.concatenate([alone.encode(batch).matrix for batch in batches()])
np.savez(folder / "vectors.npz", found=found, expected=expected)
"""


@pytest.mark.parametrize("strategy", [*SHARED, OFFLOAD])
@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_a_rank_alone_gives_the_vectors_of_a_whole_model(
    kind: str, attention: str, strategy: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PROGRAM, kind, strategy, attention, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    saved = np.load(tmp_path / "vectors.npz")
    found, expected = saved["found"], saved["expected"]
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / norms).min() >= (0.999 if kind == "cuda" else 0.9999)
