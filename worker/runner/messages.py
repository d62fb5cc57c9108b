"""The messages between an executor and its runner. Knows neither of them."""

from dataclasses import dataclass
from typing import Final

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderOrder, EncoderReport
from worker.runner.memory import MemoryReport

# With the runner at a time, beside those that it has started: the next one, so that nothing waits for it. Urgent
# batches come on top, because a full house of bulk must not keep them out.
BATCHES_AHEAD: Final = 1
URGENT_BATCHES_AHEAD: Final = 2
# A device that queues is given the next batch while it has one, since it waits for some milliseconds between two, until
# we have launched its kernels; not behind a batch longer than this, since an urgent one would wait for both.
LONGEST_QUEUED_SECONDS: Final = 0.2
# Numbers of canaries: for each stream one, and these when a process was loaded (worker.engine.in_flight).
CANARIES_AHEAD: Final = 5


@dataclass(frozen=True, slots=True)
class Load:
    """Load an encoder with the function at `factory`, written "module:function". The first message to the runner."""

    factory: str
    order: EncoderOrder


@dataclass(frozen=True, slots=True)
class Reading:
    """The bytes of the weights that were read so far. Sent by the runner now and then while it loads.

    One that names a `backend` says that this one begins to load, and nothing of bytes.
    """

    num_bytes_read: int
    num_bytes: int
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The encoder is ready for batches. Sent by the runner."""

    report: EncoderReport
    memory: MemoryReport | None = None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model cannot be loaded, and the runner ends. `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode this batch. Urgent batches come before all others, else they are encoded in the order of sending."""

    number: int
    batch: Batch
    is_urgent: bool


@dataclass(frozen=True, slots=True)
class Started:
    """This batch is encoded or queued now. Sent by the runner; if it dies, what was started is suspect."""

    number: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """From the runner: the results of a batch, a row a sequence, the seconds that the device took, from the forward
    pass to the copy back, and those that were taken to prepare it, which may have passed while the device had another
    batch. A stream's seconds are its share of the device's: two batches side by side for a second took half a second
    each, and one that was alone took all of it.

    `memory` is None where it was reported a moment ago.
    """

    number: int
    results: Ragged
    seconds: float
    memory: MemoryReport | None = None
    collate_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """The encoder raised on this batch, perhaps only because it was too large. The runner goes on."""

    number: int
    reason: str
    is_out_of_memory: bool = False
