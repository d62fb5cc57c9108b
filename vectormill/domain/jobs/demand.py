"""Demand and Room: what jobs want of the workers of a model, and what these have left."""

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Demand:
    """A job with chunks that could be dispatched now; how long it has waited since a worker last brought it on."""

    job_id: UUID
    seq: int
    model: str
    priority: int
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class Room:
    """How many chunks of a model its live workers have slots for, and how many of bulk and of interactive jobs are
    queued, or leased by one of them.
    """

    model: str
    slots: int
    outstanding: int
    interactive: int
