"""The runner's side: an encoder that computes nothing, and takes as long as a device would that it is told of.

It runs in the processes of any commit, so it looks for what it needs of them where it may be.
"""

import importlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.systems.host.device_clock import DeviceClock

# Not one of VECTORMILL_…, among which a worker looks for misspelt ones.
VARIABLE: Final = "HOST_BENCHMARK_DEVICE"
ENCODER_MODULES: Final = ("worker.model.encoder", "worker.encoder.encoder")
NUM_ROWS: Final = 4096
NOISE: Final = np.float32(1e-3)


@dataclass(frozen=True, slots=True)
class MadeUpDevice:
    """What batches take: the seconds of their arithmetic at a full device's rate, which half of `half_rate_tokens` at
    once reach, and `launch_seconds` of each batch. `clock` is the file of its DeviceClock.

    One with a rate of 0 takes no time at all.
    """

    name: str
    clock: str
    flop_per_second: float = 0.0
    launch_seconds: float = 0.0
    half_rate_tokens: float = 0.0
    flop_per_token: float = 0.0
    flop_per_squared_length: float = 0.0

    def count_seconds(self, lengths: NDArray[np.int64]) -> float:
        """Of one batch of sequences of these lengths, without padding."""
        num_tokens = int(lengths.sum())
        if not self.flop_per_second or not num_tokens:
            return 0.0
        squares = float(np.square(lengths.astype(np.float64)).sum())
        flop = self.flop_per_token * num_tokens + self.flop_per_squared_length * squares
        saturation = num_tokens / (num_tokens + self.half_rate_tokens)
        return flop / (self.flop_per_second * saturation) + self.launch_seconds

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


class MadeUpEncoder:
    """Behaves as one on CUDA: packed, the next batch queued behind the current one. Fixed rows instead of vectors."""

    def __init__(self, order: Any, device: MadeUpDevice) -> None:
        self._order = order
        self._device = device
        self._clock = DeviceClock(Path(device.clock))
        # Of nearly one direction: a canary has the same vector wherever in a batch it lies.
        random = np.random.default_rng(0)
        rows = random.standard_normal((1 + NUM_ROWS, order.card.dimension), dtype=np.float32)
        self._rows: NDArray[np.float32] = rows[0] + NOISE * rows[1:]

    def prepare(self, batch: Any) -> "MadeUpPass":
        lengths = read_lengths(batch)
        seconds = self._device.count_seconds(lengths)
        return MadeUpPass(self._take_rows(len(lengths)), seconds, int(lengths.sum()), self._clock)

    def encode(self, batch: Any) -> Any:
        forward_pass = self.prepare(batch)
        forward_pass.start()
        return forward_pass.results() if has_named_inputs(batch) else forward_pass.vectors()

    def describe(self) -> Any:
        encoder = find_module(ENCODER_MODULES)
        value = encoder.Choice("none", "a benchmark of the host")
        known = {
            "device": value,
            "backend": value,
            "precision": encoder.Choice("bf16", "as on a GPU"),
            "attention": "packed",
            "num_threads": 1,
            "load_seconds": 0.0,
            "is_packed": True,
            "is_queued": True,
        }
        names = {field.name for field in fields(encoder.EncoderReport)}
        return encoder.EncoderReport(**{name: value for name, value in known.items() if name in names})

    def _take_rows(self, num_rows: int) -> NDArray[np.float32]:
        while num_rows > len(self._rows):
            self._rows = np.concatenate([self._rows, self._rows])
        return self._rows[:num_rows]


@dataclass(slots=True)
class MadeUpPass:
    """A batch that is done when its device says so."""

    rows: NDArray[np.float32]
    seconds: float
    num_tokens: int
    clock: DeviceClock
    done_at: float = 0.0

    def start(self) -> None:
        self.done_at = self.clock.queue(self.seconds, len(self.rows), self.num_tokens)

    def vectors(self) -> NDArray[np.float32]:
        """As commits answer before results had a type of their own."""
        if self.seconds:
            time.sleep(max(0.0, self.done_at - time.monotonic()))
        return self.rows

    def results(self) -> Any:
        return importlib.import_module("vectormill.ragged").Ragged.from_matrix(self.vectors())


def has_named_inputs(batch: Any) -> bool:
    return hasattr(batch, "inputs")


def read_lengths(batch: Any) -> NDArray[np.int64]:
    lengths = batch.inputs["input_ids"].lengths if has_named_inputs(batch) else batch.lengths
    return np.asarray(lengths, dtype=np.int64)


def find_module(names: Sequence[str]) -> Any:
    """The first of these that there is: modules have moved from commit to commit.

    The oldest place comes first: where the project is installed to be edited, the newest can be imported in every tree.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"there is none of {', '.join(names)}")


def load_encoder(order: Any) -> MadeUpEncoder:
    """A factory, as worker.runner knows them."""
    return MadeUpEncoder(order, MadeUpDevice(**json.loads(os.environ[VARIABLE])))
