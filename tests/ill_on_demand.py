"""Real models whose process fails on request, signalled by a file in the engine's cache directory.

ILL: the next batch raises, and all later results are nonsense until the process is replaced. MOODY: only the
next batch raises.
"""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import DirectEncoder, Encoder, EncoderOrder, EncoderReport

ILL, MOODY, FACTORY = "ill", "moody", "factory"
NONSENSE = 1000


class IllOnDemand(DirectEncoder):
    def __init__(self, encoder: Encoder, directory: Path) -> None:
        self._encoder = encoder
        self._directory = directory
        self._is_ill = False

    def encode(self, batch: Batch) -> Ragged:
        if self._take(MOODY):
            raise RuntimeError("CUDA error: an error that does not stay")
        if self._take(ILL):
            self._is_ill = True
            raise RuntimeError("could not execute a primitive")
        forward_pass = self._encoder.prepare(batch)
        forward_pass.start()
        results = forward_pass.results()
        if not self._is_ill:
            return results
        nonsense: Any = np.full(len(results.covered), NONSENSE, dtype=results.values.dtype)
        return Ragged.from_lengths(nonsense, results.lengths)

    def describe(self) -> EncoderReport:
        return replace(self._encoder.describe(), num_streams=1, is_queued=False)

    def _take(self, name: str) -> bool:
        marker = self._directory / name
        if not marker.exists():
            return False
        marker.unlink()
        return True


def load(order: EncoderOrder) -> IllOnDemand:
    """Load the model with the function that the file FACTORY names, and let it fail on request."""
    module, _, name = (order.cache_dir / FACTORY).read_text().partition(":")
    return IllOnDemand(getattr(importlib.import_module(module), name)(order), order.cache_dir)
