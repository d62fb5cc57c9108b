"""Placement: which device holds what of a model, and why. Values only; the planner makes them, executors read them.

One structure covers every strategy: a Placement has replicas, each a full copy of the model; a Replica has stages,
consecutive layers; a Stage has shards, what one device loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model on one device. Weights and activations are within `capacity_bytes`."""

    device: str
    capacity_bytes: int
    weight_bytes: int
    activation_bytes: int

    @property
    def headroom_bytes(self) -> int:
        return self.capacity_bytes - self.weight_bytes - self.activation_bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers, and the shards that hold them together: one, or several that split every layer."""

    first_layer: int
    num_layers: int
    shards: tuple[Shard, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(shard.device for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Replica:
    """One full copy of the model. `strategy` is how its devices share it: `replicate` when there is only one.

    `max_batch_tokens` is what one forward pass of the replica may hold, over all its micro-batches.
    `relative_rate` is its predicted tokens per second by those of one device with room for a full batch.
    """

    strategy: str
    stages: tuple[Stage, ...]
    micro_batches: int
    max_batch_tokens: int
    relative_rate: float

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for stage in self.stages for device in stage.devices)


@dataclass(frozen=True, slots=True)
class Rejection:
    """An alternative that was looked at, and the sentence that says why it was not taken."""

    alternative: str
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The plan for one model on one machine's devices, with the reasons for every decision in it.

    `idle` maps a device that holds nothing to the reason. `longest_text_tokens` is less than what the model reads where
    its longest text fits nowhere. `proposals` are changes a user could make.
    """

    strategy: str
    precision: str
    replicas: tuple[Replica, ...]
    idle: Mapping[str, str]
    reasons: tuple[str, ...]
    rejected: tuple[Rejection, ...]
    longest_text_tokens: int
    proposals: tuple[str, ...] = ()

    @property
    def relative_rate(self) -> float:
        return sum(replica.relative_rate for replica in self.replicas)

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that hold something, replica by replica."""
        return tuple(device for replica in self.replicas for device in replica.devices)
