"""An encoder that records its memory use batch by batch: the model process's side of benchmarks.placed.

A runner loads it by a factory, as any other encoder. Each rank writes its readings to a file, where the
parent process finds them as soon as the batch's vectors have arrived.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CUDA
from worker.encoder.choice import FP32
from worker.encoder.encoder import Encoder, EncoderOrder, EncoderReport, ForwardPass
from worker.runner.memory import STATUS, read_peak_bytes

ALONE_FACTORY: Final = "benchmarks.children.gauged:load_alone"
SHARD_FACTORY: Final = "benchmarks.children.gauged:load_shard"
PEAK_SWITCH: Final = Path("/proc/self/clear_refs")
START_PEAK_AGAIN: Final = "5"


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory use of one rank so far.

    `before_bytes` is that of the process with all libraries imported and no model loaded; `peak_bytes` is the
    peak of the last batch. On a GPU, bytes of tensors are counted; elsewhere, resident bytes. Of the growth since
    `before_bytes`, `file_bytes` are pages of files, such as the code of libraries. How many of them one access maps
    depends on the kernel and on the page cache: 30 MB for the first batch with large folios, a few without.
    """

    pid: int
    before_bytes: int
    loaded_bytes: int
    peak_bytes: int = 0
    file_bytes: int = 0


def read_file_bytes() -> int:
    """Return the resident bytes of this process that are pages of files; 0 if Linux does not report them."""
    lines = STATUS.read_text(encoding="utf-8").splitlines() if STATUS.exists() else ()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


def find_reading(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def read_rank(directory: Path, rank: int) -> Reading:
    return Reading(**json.loads(find_reading(directory, rank).read_text(encoding="utf-8")))


class GaugedEncoder(Encoder):
    """An encoder that passes every call on to the encoder it loads, and records memory after each batch."""

    def __init__(self, order: EncoderOrder, load: Callable[[EncoderOrder], Encoder]) -> None:
        self._is_cuda = order.device.kind == CUDA
        self._path = find_reading(order.cache_dir, order.rank.number if order.rank is not None else 0)
        _import_all(order)
        self._before_bytes, self._before_file_bytes = self._read_now(), read_file_bytes()
        self._encoder = load(order)
        self._loaded_bytes = self._read_now()
        self._start_peak()
        self._write(0)

    def prepare(self, batch: Batch) -> ForwardPass:
        return _GaugedPass(self._encoder.prepare(batch), self._note)

    def describe(self) -> EncoderReport:
        return self._encoder.describe()

    def _note(self) -> None:
        """Record the peak of the batch that has just ended, and restart the measurement for the next one."""
        self._write(self._read_peak())
        self._start_peak()

    def _write(self, peak_bytes: int) -> None:
        file_bytes = max(0, read_file_bytes() - self._before_file_bytes)
        reading = Reading(os.getpid(), self._before_bytes, self._loaded_bytes, peak_bytes, file_bytes)
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(reading)), encoding="utf-8")
        unfinished.replace(self._path)

    def _read_now(self) -> int:
        if self._is_cuda:
            from torch import cuda

            return int(cuda.memory_allocated())
        return int(psutil.Process().memory_info().rss)

    def _read_peak(self) -> int:
        if self._is_cuda:
            from torch import cuda

            return int(cuda.max_memory_allocated())
        return read_peak_bytes()

    def _start_peak(self) -> None:
        if self._is_cuda:
            from torch import cuda

            cuda.reset_peak_memory_stats()
        elif PEAK_SWITCH.exists():
            PEAK_SWITCH.write_text(START_PEAK_AGAIN)


@dataclass(frozen=True, slots=True)
class _GaugedPass:
    """A forward pass that calls `note` when its results are there."""

    inner: ForwardPass
    note: Callable[[], None]

    def start(self) -> None:
        self.inner.start()

    def results(self) -> Ragged:
        results = self.inner.results()
        self.note()
        return results


def _import_all(order: EncoderOrder) -> None:
    """Import every library and join the process group, so that their memory is not counted as the model's."""
    import torch

    from worker.model.torch_encoder import DTYPES
    from worker.parallel.filling import build_skeleton
    from worker.parallel.rendezvous import PROCESS_GROUPS, join_process_group

    build_skeleton(order.card, DTYPES[FP32])
    if order.device.kind == CUDA:
        torch.cuda.init()
    else:
        torch.set_num_threads(order.num_threads)
    if order.rank is not None:
        join_process_group(order.rank, PROCESS_GROUPS[order.device.kind])


def load_alone(order: EncoderOrder) -> GaugedEncoder:
    """Load the encoder of a worker on one device."""
    from worker.encoder.backends import load_encoder

    return GaugedEncoder(order, load_encoder)


def load_shard(order: EncoderOrder) -> GaugedEncoder:
    """Load one rank's part of a model that several devices share."""
    from worker.parallel import shard_encoder

    return GaugedEncoder(order, shard_encoder.load_shard)
