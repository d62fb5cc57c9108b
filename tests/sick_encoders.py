"""Encoders that fail because of their framework, not of a text; the engine has to tell these apart."""

import itertools
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tests.faulty_engine import CRASH, FaultyEncoder
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderOrder, EncoderReport

# A file in the engine's cache directory with the number of model processes that are still to fail; later ones
# work.
NUM_SICK = "num_sick"
FEW_BATCHES = 6
# While this file exists in the engine's cache directory, an encoder that drifts is faulty.
FAULT = "fault"


class SickEncoder(FaultyEncoder):
    """An encoder that works for some batches, then raises on every one or returns nonsense."""

    def __init__(self, order: EncoderOrder, num_sound: int, reason: str, num_streams: int = 1) -> None:
        super().__init__(order, num_streams)
        self._num_sound = num_sound if take_illness(order.cache_dir / NUM_SICK) else 1 << 30
        self._count = itertools.count()
        self._reason = reason

    def encode(self, batch: Batch) -> Ragged:
        if next(self._count) < self._num_sound:
            return super().encode(batch)
        if self._reason:
            raise RuntimeError(self._reason)
        return Ragged.from_matrix(np.ones((len(batch), self._order.card.dimension), dtype=np.float32))


class MoodyEncoder(FaultyEncoder):
    """An encoder that raises on every fifth batch, whatever it holds, and works otherwise."""

    def __init__(self, order: EncoderOrder) -> None:
        super().__init__(order)
        self._count = itertools.count()

    def encode(self, batch: Batch) -> Ragged:
        if next(self._count) % 5 == 3:
            raise RuntimeError("CUDA error: an error that does not stay")
        return super().encode(batch)


class PoisonedEncoder(FaultyEncoder):
    """An encoder that raises on every batch once it has seen the word `crash`, without ending its process."""

    def __init__(self, order: EncoderOrder) -> None:
        super().__init__(order)
        self._is_ill = False

    def encode(self, batch: Batch) -> Ragged:
        self._is_ill |= bool(np.isin(CRASH, batch.input_ids))
        if self._is_ill:
            raise RuntimeError("the library's state is broken")
        return super().encode(batch)


def take_illness(path: Path) -> bool:
    """Return whether this process is one that fails, and count down the number of those in the file."""
    num_sick = int(path.read_text()) if path.is_file() else 0
    if num_sick:
        path.write_text(str(num_sick - 1))
    return num_sick > 0


class WrongEncoder(SickEncoder):
    """An encoder that raises once, then returns nonsense, as openvino after it ran out of memory."""

    def encode(self, batch: Batch) -> Ragged:
        results = super().encode(batch)
        if not self._reason and self._fell_ill_now(results):
            raise RuntimeError("[CPU] MVN node can't alloc")
        return results

    def _fell_ill_now(self, results: Ragged) -> bool:
        marker = self._order.cache_dir / f"ill-{os.getpid()}"
        if marker.exists() or not (results.covered == 1).all():
            return False
        marker.touch()
        return True


class ChangedEncoder(FaultyEncoder):
    """An encoder that is packed in the first process, and padded with two streams in every later one.

    This is what happens when no kernel for packed attention is found at a restart.
    """

    def __init__(self, order: EncoderOrder) -> None:
        marker = order.cache_dir / "was_loaded"
        self._is_first = not marker.exists()
        marker.touch()
        super().__init__(order, 1 if self._is_first else 2)

    def describe(self) -> EncoderReport:
        report = super().describe()
        if self._is_first:
            return replace(report, is_packed=True, attention="packed (varlen)")
        return replace(report, attention="padded (sdpa)", longest_bucket=64)


class DriftingEncoder(FaultyEncoder):
    """An encoder whose vectors turn a little while the file of the fault exists."""

    def encode(self, batch: Batch) -> Ragged:
        results = super().encode(batch)
        if (self._order.cache_dir / FAULT).exists():
            vectors = results.matrix.copy()
            vectors[:, ::2] *= 1.1  # a cosine of 0.9977, which the known texts after a failure let pass
            return Ragged.from_matrix(vectors)
        return results


load_soon_ill = partial(SickEncoder, num_sound=FEW_BATCHES, reason="could not execute a primitive")
load_soon_exhausted = partial(SickEncoder, num_sound=FEW_BATCHES, reason="could not create a primitive")
load_soon_wrong = partial(WrongEncoder, num_sound=FEW_BATCHES, reason="")
load_soon_ill_on_two_streams = partial(load_soon_ill, num_streams=2)
load_ill_behind_its_first_word = partial(load_soon_ill, num_sound=1)
load_ill_after_known_texts = partial(load_soon_ill, num_sound=2)
