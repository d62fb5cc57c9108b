"""Chunk: a run of items; the unit of claim, lease, retry and commit. Its states and its claim."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import SpecMismatch
from vectormill.domain.states import States
from vectormill.jobs.item import ItemFailure

PENDING: Final = "pending"
QUEUED: Final = "queued"
LEASED: Final = "leased"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
SPLIT: Final = "split"

# In the order of a chunk's way: two that no worker has, one that it has, and the ends.
UNCLAIMED_CHUNK_STATES: Final = States((PENDING, QUEUED))
OPEN_CHUNK_STATES: Final = States((*UNCLAIMED_CHUNK_STATES, LEASED))
CHUNK_STATES: Final = States((*OPEN_CHUNK_STATES, DONE, FAILED, CANCELLED, SPLIT))


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's right to one chunk until its lease ends. The fence is what every later write is checked against.

    `first_item` is the position in the job of the chunk's first item. After a retry `only_items` names the positions
    within the chunk that are to be encoded; the others have their vectors. `attempt` counts claims that failed,
    and this one; `lost` the ends of a process that speak against the texts; `lapsed` the leases that ended otherwise.
    `job_seq` is the job's place in the order of writers. `generation_fingerprint` names the vector space of the
    generation that it writes. `num_tokens` is an estimate.
    """

    chunk_id: int
    fence: int
    attempt: int
    lost: int
    lapsed: int
    num_items: int
    first_item: int
    only_items: tuple[int, ...] | None
    job_id: UUID
    job_seq: int
    job_priority: int
    spec: EncodingSpec
    generation_id: int | None
    keep_text: bool = False
    generation_fingerprint: str | None = None
    num_tokens: int = 0
    traceparent: str | None = None  # of the request that submitted the job

    def check_space(self) -> None:
        """Raises SpecMismatch when the generation holds vectors of another space than the job's."""
        ours = self.spec.fingerprint()
        if self.generation_fingerprint not in (None, ours):
            raise SpecMismatch(
                f"Generation {self.generation_id} holds vectors of {self.generation_fingerprint}, and the job's are of "
                f"{ours} ({self.spec.model} {self.spec.revision}); vector spaces are never mixed."
            )

    def wanted_items(self, start: int, stop: int) -> list[int] | None:
        """Positions, counted from `start`, that are to be encoded between `start` and `stop`; None means all."""
        if self.only_items is None:
            return None
        return [item - start for item in self.only_items if start <= item < stop]


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """The outcome of encoding a chunk, besides its vectors.

    `failures` maps the position of an item in the chunk to the reason it has no vector. `num_computed_tokens` counts
    the padding too. `truncated` are the positions of items that were cut; `num_passages` counts the passages of those
    that were not. `num_reused` counts the texts, or passages of them, whose vector was taken over from an equal one.
    `stage_seconds` is busy time by stage name. `item_tokens` are the tokens of each item that was encoded, in order, or
    empty where nobody counted them.
    """

    failures: Mapping[int, ItemFailure]
    num_tokens: int
    num_computed_tokens: int
    truncated: Sequence[int] = ()
    num_passages: int = 0
    num_reused: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    item_tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One message to publish: a chunk that was marked queued for a model's queue."""

    chunk_id: int
    dispatch_seq: int
    job_id: UUID
    seq: int
    num_items: int
    model: str
    priority: int
    num_tokens: int = 0  # estimated

    def message(self) -> dict[str, Any]:
        return {"chunk_id": self.chunk_id, "dispatch_seq": self.dispatch_seq}
