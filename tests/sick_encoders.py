"""Encoders whose framework fails and not a text: for engines that have to tell the one from the other."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.faulty_engine import CRASH, FaultyEncoder
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderOrder, EncoderReport

# In the engine's cache directory: so many model processes fall ill, and those that are started after them do not.
NUM_SICK = "num_sick"
FEW_BATCHES = 6


class SickEncoder(FaultyEncoder):
    """Encodes some batches, and then nothing any more: every further one raises, or is answered with nonsense."""

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
    """Raises on every fifth batch, whatever it holds, and is as well as ever afterwards."""

    def __init__(self, order: EncoderOrder) -> None:
        super().__init__(order)
        self._count = itertools.count()

    def encode(self, batch: Batch) -> Ragged:
        if next(self._count) % 5 == 3:
            raise RuntimeError("CUDA error: an error that does not stay")
        return super().encode(batch)


class PoisonedEncoder(FaultyEncoder):
    """Falls ill for good when it sees the word crash, without ending."""

    def __init__(self, order: EncoderOrder) -> None:
        super().__init__(order)
        self._is_ill = False

    def encode(self, batch: Batch) -> Ragged:
        self._is_ill |= bool(np.isin(CRASH, batch.input_ids))
        if self._is_ill:
            raise RuntimeError("the library's state is broken")
        return super().encode(batch)


def take_illness(path: Path) -> bool:
    """Whether this process is one of those that fall ill; the file says how many still are to."""
    num_sick = int(path.read_text()) if path.is_file() else 0
    if num_sick:
        path.write_text(str(num_sick - 1))
    return num_sick > 0


def load_soon_ill(order: EncoderOrder) -> FaultyEncoder:
    return SickEncoder(order, FEW_BATCHES, "could not execute a primitive")


def load_soon_exhausted(order: EncoderOrder) -> FaultyEncoder:
    return SickEncoder(order, FEW_BATCHES, "could not create a primitive")


def load_soon_wrong(order: EncoderOrder) -> FaultyEncoder:
    """Wrong from a batch on that raises, as openvino is after it ran out of memory."""
    return WrongEncoder(order, FEW_BATCHES, "")


def load_soon_ill_on_two_streams(order: EncoderOrder) -> FaultyEncoder:
    return SickEncoder(order, FEW_BATCHES, "could not execute a primitive", num_streams=2)


def load_ill_behind_its_first_word(order: EncoderOrder) -> FaultyEncoder:
    return SickEncoder(order, 1, "could not execute a primitive")


def load_ill_behind_the_canary(order: EncoderOrder) -> FaultyEncoder:
    return SickEncoder(order, 2, "could not execute a primitive")


def load_moody(order: EncoderOrder) -> FaultyEncoder:
    return MoodyEncoder(order)


def load_poisoned(order: EncoderOrder) -> FaultyEncoder:
    return PoisonedEncoder(order)


class WrongEncoder(SickEncoder):
    """Raises once and answers with nonsense from then on."""

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
    """Packs in the first process; in those after it no kernel for that can be had, and there are two streams."""

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


def load_changed(order: EncoderOrder) -> FaultyEncoder:
    return ChangedEncoder(order)
