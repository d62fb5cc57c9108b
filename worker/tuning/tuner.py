"""Find the fastest way to run a model on a device, or read it where it was found before."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import numpy as np

from vectormill import __version__
from vectormill.domain.errors import ModelError
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.backends import BACKENDS
from worker.devices.detect import detect_driver
from worker.devices.device import CPU, CUDA
from worker.encoder.backends import list_backends
from worker.encoder.choice import PACKED, PADDED
from worker.encoder.encoder import EncoderOrder, EncoderReport
from worker.encoder.switches import find_obstacle, is_installed, list_tried
from worker.encoder.way import Way
from worker.runner.starter import RunnerStarter
from worker.tasks.finishing import find_least_cosine, find_turned
from worker.tasks.task import WorkerTask
from worker.tuning.comparison import TrialWork, WayResult, compare_ways
from worker.tuning.record import TuningKey, TuningRecord, TuningRecords, find_moment
from worker.tuning.trial import Trial

logger = logging.getLogger(__name__)

# The switches of each way of a packed network on CUDA, from the simplest on, less those that are impossible there.
SWITCHES_OF_WAYS: Final = (
    ("fused_gelu",),
    ("compile",),
    ("fused_gelu", "compile"),
    ("flash3", "fused_gelu", "compile"),
    ("flash4", "fused_gelu", "compile"),
    ("fp8", "compile"),
    ("flash3", "fp8", "compile"),
    ("flash4", "fp8", "compile"),
)
# A query, a paragraph and a page; shorter ones for models that read no more.
LENGTHS: Final = (16, 100, 512)
# A batch as large as those in service: a GPU is busy, and a processor's batches fit into its caches.
BATCH_TOKENS: Final = {CPU: 1024}
ACCELERATOR_BATCH_TOKENS: Final = 8_192
NUM_BATCHES: Final = 4
# A compiler may take minutes, while the worker serves as before.
LOAD_SECONDS: Final = 600.0
ANSWER_SECONDS: Final = 60.0
WORD: Final = "air "  # a single token in most vocabularies


def list_ways(order: EncoderOrder) -> tuple[Way, ...]:
    """Return the ways in which this order can be carried out, the usual one first.

    There is none to compare where bits may not change, where devices share the model, and for models of other kinds.
    """
    card = order.card
    if order.is_reproducible or order.rank is not None or card.is_extractor or card.static is not None:
        return ()
    try:
        usable = list_backends(
            order.backend,
            order.device,
            lambda backend: is_installed(backend.package),
            must_pack=order.attention == PACKED,
        )
    except ModelError:  # loading says it, too
        return ()
    ways = [Way(backend.name) for backend, _ in usable]
    if order.device.kind == CUDA and order.attention != PADDED:
        tried = {name for name in list_tried(order.switches) if not find_obstacle(name, order.device)}
        packed = [backend.name for backend, _ in usable if backend.has_packed_attention]
        ways += [
            Way(backend, tuple(name for name in switches if name in tried))
            for backend in packed
            for switches in SWITCHES_OF_WAYS
        ]
    return tuple(dict.fromkeys(ways))


def list_impossible(order: EncoderOrder, ways: Sequence[Way]) -> tuple[WayResult, ...]:
    """Return, for each switch that is in none of these ways because the device cannot have it, the reason."""
    if not any(way.switches for way in ways):
        return ()
    obstacles = {name: find_obstacle(name, order.device) for name in list_tried(order.switches)}
    return tuple(
        WayResult(Way(ways[0].backend, (name,)), flaw=flaw) for name, flaw in obstacles.items() if flaw
    )


def describe_circumstances(order: EncoderOrder) -> TuningKey:
    """Return what the speed of a model depends on that is carried out by this order."""
    libraries = [f"vectormill {__version__}"]
    for package in sorted({"transformers", *(backend.package for backend in BACKENDS.values())}):
        with suppress(PackageNotFoundError):
            libraries.append(f"{package} {version(package)}")
    if order.device.kind == CUDA:
        usable = (name for name in list_tried(order.switches) if not find_obstacle(name, order.device))
        libraries += [f"driver {detect_driver()}", *usable]
    return TuningKey(
        f"{order.device.description or order.device.kind}, {order.num_threads} threads",
        tuple(sorted(order.device.features)),
        tuple(libraries),
        order.card.name,
        order.card.revision,
        order.backend,
        order.precision,
        order.attention,
        order.switches,
        order.device.num_parts,
    )


def find_record(order: EncoderOrder) -> TuningRecord | None:
    """Return what was found about the ways of this order; None if nothing was, or the fastest is none any more."""
    ways = list_ways(order)
    if len(ways) < 2:
        return None
    record = TuningRecords(order.cache_dir).find(describe_circumstances(order))
    if record is None:
        return None
    found = record.way
    is_known = any(found.backend == way.backend and set(found.switches) <= set(way.switches) for way in ways)
    return record if is_known else None


def refuse_way(order: EncoderOrder, flaw: str) -> TuningRecord | None:
    """Note for all workers of the machine that the order's way failed in service. Return what is left of the record."""
    assert order.way is not None
    try:
        return TuningRecords(order.cache_dir).refuse(describe_circumstances(order), order.way, flaw)
    except OSError as error:
        logger.warning("It could not be noted that %s fails, so others may try it: %s", order.way, error)
        return None


class WayTuner:
    """Compares the ways of one model on one device. `task` makes the model's input from texts."""

    def __init__(self, starter: RunnerStarter, task: WorkerTask, known: Batch) -> None:
        """Keep what is needed. `known` are texts whose results are compared."""
        self._starter = starter
        self.order = starter.order
        self._task = task
        self._known = known
        self._records = TuningRecords(self.order.cache_dir)
        self._circumstances = describe_circumstances(self.order)
        self.ways = list_ways(self.order)
        self.current = self.order.way or next(iter(self.ways), None)

    @contextmanager
    def tuned(
        self, stopping: threading.Event, tell: Callable[[Way], object] = lambda way: None
    ) -> Iterator[TuningRecord]:
        """Compare all ways and yield what was found, which is kept; or what another process has found meanwhile.

        No other process tries a way on the device until the block ends. `tell` is called with each way before it is
        tried. Raise TrialFailed if the ways cannot be compared, TrialStopped once `stopping` is set, and OSError.
        """
        with self._records.locked(self.order.device.uuid or self.order.device.name, stopping):
            record = self._records.find(self._circumstances)
            if record is None:
                workloads = self._make_workloads()
                findings = compare_ways(
                    self.ways, partial(self._open, stopping, tell), self._known, workloads, self._find_flaw
                )
                findings += list_impossible(self.order, self.ways)
                record = TuningRecord(
                    self._circumstances,
                    find_moment(),
                    tuple(workload.length for workload in workloads),
                    findings,
                )
                self._records.keep(record)
            yield record

    @contextmanager
    def _open(self, stopping: threading.Event, tell: Callable[[Way], object], way: Way) -> Iterator[Trial]:
        tell(way)
        starter = self._starter.with_order(replace(self.order, way=way))
        with Trial(
            starter, load_seconds=LOAD_SECONDS, answer_seconds=ANSWER_SECONDS, stopping=stopping
        ) as trial:
            yield trial

    def _make_workloads(self) -> tuple[TrialWork, ...]:
        """Return batches for each length, laid out as those of real texts are."""
        longest = self.order.card.max_tokens
        wanted = BATCH_TOKENS.get(self.order.device.kind, ACCELERATOR_BATCH_TOKENS)
        workloads = {}
        for length in LENGTHS:
            text = self._task.make_known_inputs(WORD * min(length, longest))
            one = Batch(text)
            number = max(1, wanted // one.num_tokens)
            batch = Batch({name: Ragged.join([rows] * number) for name, rows in text.items()})
            workloads[one.num_tokens] = TrialWork(one.num_tokens, (batch,) * NUM_BATCHES)
        return tuple(workloads.values())

    def _find_flaw(self, results: Ragged, expected: Ragged, report: EncoderReport) -> str:
        """Return what is wrong with results of the known texts; empty if each keeps the promise of its precision."""
        for index in range(len(expected)):
            row, own = expected.row(index), results.part(index, index + 1)
            flaw = self._task.find_flaw(own, row)
            if not flaw and report.gives_vectors and row.dtype == np.float32:
                flaw = find_turned(own, row, find_least_cosine(report.precision.value, report.switches))
            if flaw:
                return flaw
        return ""
