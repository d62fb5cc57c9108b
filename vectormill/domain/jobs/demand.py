"""Demand and Room: what jobs want of the workers of a model, and what these have left."""

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Demand:
    """A job with chunks that could be dispatched now; how long it has waited since a worker last brought it on.

    `chunk_tokens` are the estimated tokens of its next chunk; of open chunks some may be with a worker already.
    """

    job_id: UUID
    seq: int
    model: str
    priority: int
    waited_seconds: float
    chunk_tokens: int
    num_open_chunks: int


@dataclass(frozen=True, slots=True)
class Room:
    """What the live workers of a model have room for, and what takes it: chunks that are queued, or leased by one of
    them. Chunks are bounded by slots, and estimated tokens by what the workers ask for. Of interactive jobs only the
    chunks are counted, apart.
    """

    model: str
    slots: int
    outstanding: int
    interactive: int
    max_tokens: int
    outstanding_tokens: int
