"""An encoder that records its memory use batch by batch: the model process's side of benchmarks.placed.

A runner loads it by a factory, as any other encoder. Each rank writes its readings to a file, where the
parent process finds them as soon as the batch's vectors have arrived. While the file PROFILE lies beside the
readings, it also records which kernels run on the device, and writes them when that file has gone.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from threading import get_ident
from typing import Any, Final

import psutil

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CUDA
from worker.encoder.choice import FP32
from worker.encoder.encoder import Encoder, EncoderOrder, EncoderReport, ForwardPass
from worker.runner.memory import STATUS, read_peak_bytes

FACTORY: Final = "benchmarks.children.gauged:load_gauged"
PEAK_SWITCH: Final = Path("/proc/self/clear_refs")
START_PEAK_AGAIN: Final = "5"
PROFILE: Final = "profile"
KERNELS: Final = "kernels.json"


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


class Profiler:
    """Records the kernels of the batches between the creation and the removal of a file PROFILE.

    torch wants a profiler to end in the thread in which it began, so of several streams the first is recorded.
    """

    def __init__(self, directory: Path, *, is_cuda: bool) -> None:
        self._asked, self._found = directory / PROFILE, directory / KERNELS
        self._is_cuda = is_cuda
        self._running: Any = None
        self._thread = self._num_batches = 0

    def begin(self) -> None:
        """Count a batch that starts, and start recording if that is asked for."""
        if self._running is None and self._asked.exists():
            from torch.profiler import ProfilerActivity, profile

            activity = ProfilerActivity.CUDA if self._is_cuda else ProfilerActivity.CPU
            self._thread, self._num_batches = get_ident(), 0
            self._running = profile(activities=[activity])
            self._running.__enter__()
        if self._running is not None and self._thread == get_ident():
            self._num_batches += 1

    def end(self) -> None:
        """Write what was recorded if it is not asked for any more."""
        if self._running is None or self._thread != get_ident() or self._asked.exists():
            return
        self._running.__exit__(None, None, None)
        found = summarize(map(self._read, self._running.events()))
        found |= {"launches": found["launches"] / max(1, self._num_batches)}
        unfinished = self._found.with_suffix(".tmp")
        unfinished.write_text(json.dumps(found), encoding="utf-8")
        unfinished.replace(self._found)
        self._running = None

    def _read(self, event: Any) -> tuple[float, float, float, str]:
        """Return start, end and own time of a kernel, and its name; without a GPU of an operator of torch."""
        span = event.time_range
        own = span.end - span.start if self._is_cuda else event.self_cpu_time_total
        return span.start, span.end, own, event.name


def summarize(events: Iterable[tuple[float, float, float, str]]) -> dict[str, Any]:
    """Return the number of kernels, the share of time in which none ran, and the shares of the eight dearest."""
    spent: defaultdict[str, float] = defaultdict(float)
    spans = sorted(events)
    busy, until = 0.0, 0.0
    for start, end, own, name in spans:
        spent[name] += own
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0] if spans else 0.0
    total = sum(spent.values()) or 1.0
    kernels = [
        [name[:80], microseconds / total]
        for name, microseconds in nlargest(8, spent.items(), key=itemgetter(1))
    ]
    return {"launches": len(spans), "idle": 1 - busy / whole if whole else None, "kernels": kernels}


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
        self._profiler = Profiler(order.cache_dir, is_cuda=self._is_cuda)
        self._path = find_reading(order.cache_dir, order.rank.number if order.rank is not None else 0)
        _import_all(order)
        self._before_bytes, self._before_file_bytes = self._read_now(), read_file_bytes()
        self._encoder = load(order)
        self._loaded_bytes = self._read_now()
        self._start_peak()
        self._write(0)

    def prepare(self, batch: Batch) -> ForwardPass:
        return _GaugedPass(self._encoder.prepare(batch), self._note, self._profiler)

    def take_waited_seconds(self) -> float:
        return self._encoder.take_waited_seconds()

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
    profiler: Profiler

    def start(self) -> None:
        self.profiler.begin()
        self.inner.start()

    def results(self) -> Ragged:
        results = self.inner.results()
        self.note()
        self.profiler.end()
        return results


def _import_all(order: EncoderOrder) -> None:
    """Import every library and join the process group, so that their memory is not counted as the model's."""
    import torch

    from worker.model.torch_encoder import DTYPES
    from worker.parallel.agreement import PROCESS_GROUPS, join_process_group
    from worker.parallel.filling import build_skeleton

    build_skeleton(order.card, DTYPES[FP32])
    if order.device.kind == CUDA:
        torch.cuda.init()
    else:
        torch.set_num_threads(order.num_threads)
    if order.rank is not None:
        join_process_group(order.rank, PROCESS_GROUPS[order.device.kind])


def load_gauged(order: EncoderOrder) -> GaugedEncoder:
    """Load the encoder of a worker on one device, or one rank's part of a model that several devices share."""
    from worker.encoder.backends import load_encoder

    return GaugedEncoder(order, load_encoder)
