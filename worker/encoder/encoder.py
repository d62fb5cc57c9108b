"""The contract between the engine and whatever computes vectors. Knows no framework; imports no torch."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import Device
from worker.placement.placement import Rank


class DeviceLost(Exception):
    """The device can compute nothing more in this process, which has to end; the batch may be to blame or not."""


class ForwardPass(Protocol):
    """One batch on its way through an encoder: prepared, started, computed.

    Each step raises what the framework raises.
    """

    def start(self) -> None:
        """Queue the batch on a device that computes by itself, without waiting. Elsewhere do nothing."""
        ...

    def results(self) -> Ragged:
        """Return the results as Encoder.encode does. Waits for the device, or computes them here."""
        ...


@dataclass(frozen=True, slots=True)
class Deferred:
    """A forward pass that is computed when its results are asked for, as on a processor."""

    compute: Callable[[], Ragged]

    def start(self) -> None:
        pass

    def results(self) -> Ragged:
        return self.compute()


AUTO: Final = "auto"

# Called while weights are read, with the bytes read so far and those to be read.
OnRead = Callable[[int, int], None]
# Called with the name of each backend before it loads the model.
OnBackend = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EncoderOrder:
    """The model to load, and where. `backend`, `precision`, `attention` and `switches` may be "auto".

    `on_read` and `on_backend` are of the process that loads; an order that goes to another process has neither. `left`
    names the backends that are not to be tried again, each with its reason.
    """

    card: ModelCard
    device: Device
    backend: str
    precision: str
    num_threads: int
    cache_dir: Path
    attention: str = "auto"
    rank: Rank | None = None  # when several devices share the model
    on_read: OnRead | None = None
    switches: str = "auto"  # of worker.encoder.switches
    on_backend: OnBackend | None = None
    left: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice and its reason, in a sentence for people."""

    value: str
    reason: str


def device_choice(order: EncoderOrder) -> Choice:
    """Return the device with the reason it was chosen and what it is."""
    return Choice(order.device.name, f"{order.device.reason}; {order.device.description}")


@dataclass(frozen=True, slots=True)
class Loading:
    """The bytes of a model's files that one process has read for its device, and the seconds that loading took."""

    device: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """A report on the encoder that was loaded. `attention` is the kernel; `notes` are fallbacks, one sentence each.

    `is_packed` says that a batch costs its tokens, and not its longest sequence times its number of sequences.
    `num_streams` batches are encoded side by side, each by its share of the device. `is_queued` says that a batch which
    was started waits on the device for the one before it, so that the device does not wait for us between the two.
    Where each new shape of a batch costs memory, `longest_bucket` ends the LengthBuckets to which sequences are padded.
    `switches` are those in use. `gives_vectors` says that each result is card.dimension values of float32, which are
    normalized and cut as jobs ask; else rows are handed on as they come, of any length and type. A new field goes to
    the end: in an upgrade it is told to workers that do not know it.
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
    loadings: tuple[Loading, ...] = ()  # one of each process
    switches: tuple[str, ...] = ()  # of worker.encoder.switches
    gives_vectors: bool = True

    @property
    def num_started(self) -> int:
        """Return how many batches a process works at: one for each stream, and one queued on the device."""
        return self.num_streams + self.is_queued


def find_changes(before: EncoderReport, now: EncoderReport) -> tuple[str, ...]:
    """Return a sentence for each difference that matters to batches, leaving out how long loading took."""
    names = (
        "attention",
        "switches",
        "num_threads",
        "is_packed",
        "num_streams",
        "is_queued",
        "longest_bucket",
    )
    pairs = [(name, getattr(before, name), getattr(now, name), "") for name in names]
    for name in ("backend", "precision"):
        was, became = getattr(before, name), getattr(now, name)
        pairs.append((name, was.value, became.value, f" ({became.reason})"))
    return tuple(
        f"{name} was {was} and is {became}{why}" for name, was, became, why in pairs if was != became
    )


class Encoder(Protocol):
    """One loaded model on one device. As many threads encode as it has streams, each one batch at a time; another
    may prepare the next.
    """

    @abstractmethod
    def prepare(self, batch: Batch) -> ForwardPass:
        """Do what can be done before the batch's turn. Raises as `encode` does."""

    @abstractmethod
    def describe(self) -> EncoderReport:
        """Return what was loaded, and the reason for every choice."""

    def encode(self, batch: Batch) -> Ragged:
        """Return the results, a row a sequence. Vectors are float32 rows of card.dimension: pooled and passed through
        Dense modules, not normalized and not cut.

        Raises whatever the framework raises: worker.encoder.memory tells which of it means too little memory, and
        of all else the caller finds the sequence that is to blame. Raises DeviceLost.
        """
        forward_pass = self.prepare(batch)
        forward_pass.start()
        return forward_pass.results()


class DirectEncoder(Encoder, Protocol):
    """An encoder whose forward pass has no steps: all is computed when its results are asked for."""

    @abstractmethod
    def encode(self, batch: Batch) -> Ragged:
        """Encode as Encoder.encode does."""

    def prepare(self, batch: Batch) -> ForwardPass:
        return Deferred(partial(self.encode, batch))
