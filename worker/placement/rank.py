"""Rank: one of the processes that share a replica, and what it has to know to find the others. A value."""

from dataclasses import dataclass
from pathlib import Path

from worker.placement.placement import Replica


@dataclass(frozen=True, slots=True)
class Rank:
    """`stage_layers` are the numbers of layers of all stages: one for each rank, or one for all of them together.

    `meeting_point` is a file that does not exist yet, through which the ranks of one start find each other.
    """

    number: int
    world_size: int
    strategy: str
    stage_layers: tuple[int, ...]
    micro_batches: int
    meeting_point: Path
    timeout_seconds: float

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.world_size - 1

    @property
    def first_layer(self) -> int:
        """Return the first layer of this rank's stage."""
        return sum(self.stage_layers[: self.number])


def make_ranks(replica: Replica, meeting_point: Path, timeout_seconds: float) -> tuple[Rank, ...]:
    """Return the ranks of a replica, in the order of its devices."""
    world_size = len(replica.devices)
    layers = tuple(stage.num_layers for stage in replica.stages)
    return tuple(
        Rank(
            number,
            world_size,
            replica.strategy,
            layers,
            replica.micro_batches,
            meeting_point,
            timeout_seconds,
        )
        for number in range(world_size)
    )
