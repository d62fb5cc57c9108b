"""What an executor and its runner say to each other over a pipe. Knows neither of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batching.token_batch import TokenBatch
from worker.model.encoder import EncoderOrder, EncoderReport


@dataclass(frozen=True, slots=True)
class Load:
    """To the runner, first: load an encoder with the function at `factory`, written "module:function"."""

    factory: str
    order: EncoderOrder


@dataclass(frozen=True, slots=True)
class Loaded:
    """From the runner: the encoder is ready for batches."""

    report: EncoderReport


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """From the runner, which ends: the model cannot be had. `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Encode:
    """To the runner: batches are encoded in the order in which they are sent."""

    number: int
    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class Encoded:
    """From the runner: the vectors [n, dim] of a batch, and the seconds that the encoder took."""

    number: int
    vectors: NDArray[np.float32]
    seconds: float


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """From the runner, which goes on: the encoder raised on this batch."""

    number: int
    reason: str
