"""Weights that are mapped: forgetting them gives memory back and changes nothing."""

from pathlib import Path

import numpy as np

from worker.openvino.network import MappedWeights


def test_what_was_forgotten_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "network.bin"
    content = np.random.default_rng(0).integers(0, 256, 100_001, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    weights = MappedWeights(path)
    assert np.array_equal(weights.bytes, content)
    weights.forget()
    assert np.array_equal(weights.bytes, content)


def test_the_memory_outlives_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "network.bin"
    path.write_bytes(b"weights")
    weights = MappedWeights(path)
    path.unlink()
    weights.forget()
    assert weights.bytes.tobytes() == b"weights"
