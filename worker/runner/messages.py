"""The messages between an executor and its runner."""

from dataclasses import dataclass
from typing import Final

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import EncoderOrder, EncoderReport
from worker.runner.memory import MemoryReport

# The number of batches that are with the runner in addition to those that it has started, so that it never
# waits for the next one. Urgent batches are sent in addition, because waiting bulk must not keep them out.
BATCHES_AHEAD: Final = 1
URGENT_BATCHES_AHEAD: Final = 2
# A device with a queue is given the next batch while it computes one, because it would otherwise wait some
# milliseconds until the kernels of the next are launched. This is not done after a batch that takes longer
# than this, since an urgent batch would have to wait for both.
LONGEST_QUEUED_SECONDS: Final = 0.2
# The number of batches of known texts after a load, in addition to one for each stream (worker.engine.in_flight).
KNOWN_BATCHES_AHEAD: Final = 5


@dataclass(frozen=True, slots=True)
class Load:
    """The first message to the runner: load an encoder with the function `factory`, as "module:function"."""

    factory: str
    order: EncoderOrder


@dataclass(frozen=True, slots=True)
class Reading:
    """A report of the runner while it loads: how many bytes of the weights were read so far.

    If `backend` is given, the message says instead that this backend begins to load, and its byte counts mean
    nothing.
    """

    num_bytes_read: int
    num_bytes: int
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A message of the runner: the encoder is ready for batches."""

    report: EncoderReport
    memory: MemoryReport | None = None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A message of the runner: the model cannot be loaded, and the runner ends. `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Encode:
    """A message to the runner: encode this batch.

    Urgent batches are encoded before all others; otherwise the order of sending is kept.
    """

    number: int
    batch: Batch
    is_urgent: bool


@dataclass(frozen=True, slots=True)
class Started:
    """A message of the runner: this batch is now being computed or is queued on the device.

    If the runner dies, batches that were started are suspect.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message of the runner: the results of a batch, one row for each sequence.

    `seconds` is the device's time from the forward pass to the copy back. Where streams share a device, it is
    the batch's share: two batches side by side for a second took half a second each. Where ranks share a model, it
    is the slowest rank's, without waits for the others. `share` is the part of `seconds` in which a device
    that workers share computed for this one. `collate_seconds` is the time to prepare the batch, which may have passed
    while the device computed another. `memory` is None if it was reported a moment ago.
    """

    number: int
    results: Ragged
    seconds: float
    memory: MemoryReport | None = None
    collate_seconds: float = 0.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """A message of the runner: the encoder raised an error on this batch, perhaps because it was too large.

    The runner goes on.
    """

    number: int
    reason: str
    is_out_of_memory: bool = False
