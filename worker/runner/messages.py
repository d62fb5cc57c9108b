"""What an executor and its runner say to each other over a pipe. Knows neither of them."""

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
# And canaries: for each stream one, and these when a process was loaded (worker.engine.canary).
CANARIES_AHEAD: Final = 5


@dataclass(frozen=True, slots=True)
class Load:
    """To the runner, first: load an encoder with the function at `factory`, written "module:function"."""

    factory: str
    order: EncoderOrder


@dataclass(frozen=True, slots=True)
class Reading:
    """From the runner, now and then while it loads: so much of the weights has been read.

    One that names a `backend` says that this one begins to load, and nothing of bytes. It is no message of its own,
    because during an upgrade a worker of the release before would not know it.
    """

    num_bytes_read: int
    num_bytes: int
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """From the runner: the encoder is ready for batches."""

    report: EncoderReport
    memory: MemoryReport | None = None


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """From the runner, which ends: the model cannot be had. `reason` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Encode:
    """To the runner: urgent batches are encoded before all others, else in the order in which they are sent."""

    number: int
    batch: Batch
    is_urgent: bool
    block: int | None = (
        None  # of the memory that both share, for the batch and its results (worker.runner.channel)
    )


@dataclass(frozen=True, slots=True)
class Started:
    """From the runner: this batch is encoded or queued now. If the process dies, what was started is suspect."""

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
    """From the runner, which goes on: the encoder raised on this batch, maybe only because it was too large."""

    number: int
    reason: str
    is_out_of_memory: bool = False
