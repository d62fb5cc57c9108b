"""BatchLog: the very batches that an engine formed, written down by its model's process. Knows no backend.

The process loads `load_encoder` of this module instead of the worker's own, which passes everything on. To write a
batch down takes some 20 µs of the 70 ms that it is computed for.
"""

from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.backends import factory
from worker.batching.batch import Batch
from worker.encoder.encoder import Encoder, EncoderOrder, EncoderReport
from worker.encoder.forward_pass import ForwardPass

FACTORY: Final = "benchmarks.systems.bound.batch_log:load_encoder"
FILE_NAME: Final = "batches.bin"  # in the cache's directory, which a model's process is told of anyway


class RecordingEncoder(Encoder):
    """Appends each batch to a file: its number of sequences, their lengths, their ids, all int32."""

    def __init__(self, encoder: Encoder, path: Path) -> None:
        self._encoder = encoder
        self._file = path.open("ab", buffering=0)  # until the process ends

    def prepare(self, batch: Batch) -> ForwardPass:
        head = np.array([len(batch), *batch.lengths], dtype=np.int32)
        self._file.write(head.tobytes() + batch.input_ids.astype(np.int32).tobytes())
        return self._encoder.prepare(batch)

    def describe(self) -> EncoderReport:
        return self._encoder.describe()


def load_encoder(order: EncoderOrder) -> Encoder:
    """A factory, as worker.runner knows them."""
    return RecordingEncoder(factory.load_encoder(order), order.cache_dir / FILE_NAME)


class BatchLog:
    """The parent's side: what was written since the last look."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / FILE_NAME
        self._read_to = 0
        self.skip()

    def skip(self) -> None:
        """Whatever is there by now is of no interest."""
        self._read_to = self._path.stat().st_size if self._path.exists() else 0

    def copy_to(self, path: Path) -> None:
        """What was written since `skip`."""
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            path.write_bytes(file.read())


def read_batches(path: Path) -> list[Batch]:
    """In the order in which they were prepared."""
    values: NDArray[np.int32] = np.fromfile(path, dtype=np.int32)
    batches, place = [], 0
    while place < len(values):
        start = place + 1 + int(values[place])
        bounds = start + np.cumsum([0, *values[place + 1 : start]])
        batches.append(Batch.from_ids([values[begin:end] for begin, end in pairwise(bounds)]))
        place = int(bounds[-1])
    return batches
