"""The interface between the engine and the encoders that compute vectors. Imports no framework."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import Device
from worker.encoder.way import Way
from worker.placement.placement import Rank


class DeviceLost(Exception):
    """The device can compute nothing more in this process, which must exit.

    The batch may or may not be the cause.
    """


class ForwardPass(Protocol):
    """One batch on its way through an encoder: prepared, then started, then computed.

    Each step may raise whatever the framework raises.
    """

    def start(self) -> None:
        """Queue the batch on a device that computes asynchronously, without waiting.

        On other devices do nothing.
        """
        ...

    def results(self) -> Ragged:
        """Return the results as Encoder.encode does. Waits for the device, or computes them now."""
        ...


@dataclass(frozen=True, slots=True)
class Deferred:
    """A forward pass that is computed when its results are requested, as on a CPU."""

    compute: Callable[[], Ragged]

    def start(self) -> None:
        pass

    def results(self) -> Ragged:
        return self.compute()


AUTO: Final = "auto"

# Called while weights are read, with the number of bytes read so far and in total.
OnRead = Callable[[int, int], None]
# Called with the name of each backend before it loads the model.
OnBackend = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EncoderOrder:
    """The model to load, and how. `backend`, `precision`, `attention` and `switches` may be "auto".

    `on_read` and `on_backend` are callbacks in the process that loads; an order sent to another process has
    neither. `left` lists the backends that must not be tried again, each with its reason. `way` is what "auto" stands
    for where it was measured, as far as it is usable.
    """

    card: ModelCard
    device: Device
    backend: str
    precision: str
    num_threads: int
    cache_dir: Path
    attention: str = "auto"
    rank: Rank | None = None  # set if several devices share the model
    on_read: OnRead | None = None
    switches: str = "auto"  # names from worker.encoder.switches
    on_backend: OnBackend | None = None
    left: tuple[tuple[str, str], ...] = ()
    is_reproducible: bool = False  # each text has the same bits in any batch
    way: Way | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice and its reason, as a sentence for people."""

    value: str
    reason: str


def device_choice(order: EncoderOrder) -> Choice:
    """Return the device's name; its reason says why it was chosen and what it is."""
    return Choice(order.device.name, f"{order.device.reason}; {order.device.description}")


@dataclass(frozen=True, slots=True)
class Loading:
    """The bytes that one process has read from a model's files, and the seconds that loading took."""

    device: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """A report on the loaded encoder. `attention` is the kernel; each of `notes` is a sentence on a fallback.

    `is_packed` means that the cost of a batch is its number of tokens, not its longest sequence times its
    number of sequences. `num_streams` batches are encoded in parallel, each with its share of the device.
    `is_queued` means that a started batch waits on the device for the one before it, so that the device is
    never idle between the two. If each new batch shape costs memory, sequences are padded to LengthBuckets up
    to `longest_bucket`. `switches` are those in use. `gives_vectors` means that each result is card.dimension
    float32 values, which are normalized and cut as jobs ask; otherwise rows of any length and type are passed
    on unchanged. Where `tile_tokens` is not 0, a batch is computed in tiles of so many tokens. `pools_passages`
    means that a batch may ask for the vectors of passages (SPANS). Where devices share a model in `num_stages` stages,
    each of these computes another batch. Add new fields at the end: during an upgrade, workers of the previous version
    receive them too.
    """

    device: Choice
    backend: Choice
    precision: Choice
    attention: str
    num_threads: int
    load_seconds: float
    notes: tuple[str, ...] = ()
    is_packed: bool = False
    num_streams: int = 1
    is_queued: bool = False
    longest_bucket: int | None = None
    loadings: tuple[Loading, ...] = ()  # one per process
    switches: tuple[str, ...] = ()  # names from worker.encoder.switches
    gives_vectors: bool = True
    tile_tokens: int = 0
    pools_passages: bool = False
    num_stages: int = 1

    @property
    def num_computed(self) -> int:
        """Return how many batches are computed at once: one per stream, or one per stage."""
        return self.num_streams + self.num_stages - 1

    @property
    def num_started(self) -> int:
        """Return the number of batches that are started at once: those computed, and one queued on the device."""
        return self.num_computed + self.is_queued


def find_changes(before: EncoderReport, now: EncoderReport) -> tuple[str, ...]:
    """Return a sentence for each difference between two reports that matters to batches.

    How long loading took does not matter.
    """
    names = (
        "attention",
        "switches",
        "num_threads",
        "is_packed",
        "num_streams",
        "is_queued",
        "longest_bucket",
        "tile_tokens",
        "num_stages",
    )
    pairs = [(name, getattr(before, name), getattr(now, name), "") for name in names]
    for name in ("backend", "precision"):
        was, became = getattr(before, name), getattr(now, name)
        pairs.append((name, was.value, became.value, f" ({became.reason})"))
    return tuple(
        f"{name} changed from {was} to {became}{why}" for name, was, became, why in pairs if was != became
    )


class Encoder(ABC):
    """One loaded model on one device. Up to `num_streams` threads encode, each one batch at a time.

    Another thread may prepare the next batch meanwhile.
    """

    @abstractmethod
    def prepare(self, batch: Batch) -> ForwardPass:
        """Prepare the batch as far as possible before its turn on the device. Raises as `encode` does."""

    _report: EncoderReport

    def note_loading(self, order: EncoderOrder, started_at: float, num_bytes: int, **found: Any) -> None:
        """Make the report. Loading began at `started_at` and read `num_bytes`; `found` are other fields of it."""
        seconds = time.perf_counter() - started_at
        loading = Loading(order.device.name, num_bytes, seconds)
        known = {"device": device_choice(order), "num_threads": order.num_threads, "loadings": (loading,)}
        self._report = EncoderReport(**{**known, "load_seconds": seconds, **found})

    def describe(self) -> EncoderReport:
        """Return a report on what was loaded, with the reason for every choice."""
        return self._report

    def take_waited_seconds(self) -> float:
        """Return for how long the batches that are done since the last call have waited for other processes."""
        return 0.0

    def encode(self, batch: Batch) -> Ragged:
        """Return the results, one row per sequence.

        Vectors are float32 rows of card.dimension values: pooled and passed through Dense modules, but
        neither normalized nor cut. Raises DeviceLost and whatever the framework raises: worker.encoder.memory
        recognizes out-of-memory errors; for any other error the caller searches for the sequence that causes
        it.
        """
        forward_pass = self.prepare(batch)
        forward_pass.start()
        return forward_pass.results()


class DirectEncoder(Encoder):
    """An encoder without separate steps: everything is computed when the results are requested."""

    @abstractmethod
    def encode(self, batch: Batch) -> Ragged:
        """Return the results as Encoder.encode does."""

    def prepare(self, batch: Batch) -> ForwardPass:
        return Deferred(partial(self.encode, batch))
