"""Placements: which device holds what of a model, and why. Plain values and their JSON.

One structure covers every strategy: a Placement has replicas, each a full copy of the model; a Replica has
stages, which are consecutive layers; a Stage has shards, which one device loads. A Rank is one of the
processes that share a replica; an Assignment is a replica with its devices, as the launcher passes it to its
worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from vectormill.workers.plan_picture import draw_plan
from worker.devices.device import Device
from worker.placement.capacity import MEMORY_SHARE
from worker.placement.footprint import NOTHING, Moment
from worker.placement.strategies import STRATEGIES

AUTO: Final = "auto"
# From the largest weights to the smallest, the order in which proposals are made.
PRECISIONS: Final = ("fp32", "bf16", "int8")


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The settings of a plan. `memory_share` is the share of a device's memory that all programs may fill.

    A replica has to hold one text of `max_tokens`. `attention` is the kernel's name, as in an EncoderReport;
    if empty, the plan assumes the kernel with the largest memory that the devices may use. `find_obstacle`
    returns why devices cannot hold the model by a strategy in a `precision`, as that of worker.placement.obstacles;
    None leaves it to the model's shape. `precisions` are the alternatives that may be proposed. `results` is what a
    text's results take beyond a dense vector. A batch of `full_batch_tokens` makes a device as fast as it can be; 0
    means what devices of its kind take. `host_share` is the share of that part of main memory that its layers may
    take.
    """

    precision: str
    max_tokens: int
    devices: str = AUTO
    strategy: str = AUTO
    memory_share: float = MEMORY_SHARE
    find_obstacle: Callable[..., str] | None = None
    attention: str = ""
    precisions: tuple[str, ...] = PRECISIONS
    results: Moment = NOTHING
    host_share: float = 1
    full_batch_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model on one device. Weights and activations fit into `capacity_bytes`.

    `host_bytes` of further weights are in main memory, and copied to the device in each pass.
    """

    device: str
    capacity_bytes: int
    weight_bytes: int
    activation_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers and the shards that hold them: one shard, or several that split every layer."""

    first_layer: int
    num_layers: int
    shards: tuple[Shard, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(shard.device for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Replica:
    """One full copy of the model. `strategy` is how its devices share it: `replicate` for a single device.

    `max_batch_tokens` is what a forward pass of the replica has room for, over all ranks.
    `relative_rate` is its predicted rate relative to one device with memory for a full batch.
    `longest_text_tokens` is the longest text that its plan has room for, or 0 if nothing limits it.
    `num_offloaded` is the number of layers in main memory.
    """

    strategy: str
    stages: tuple[Stage, ...]
    max_batch_tokens: int
    relative_rate: float
    longest_text_tokens: int = 0
    num_offloaded: int = 0

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for stage in self.stages for device in stage.devices)


@dataclass(frozen=True, slots=True)
class Rejection:
    """An alternative that was considered, with a sentence on why it was not chosen."""

    alternative: str
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The plan for one model on one machine's devices, with the reasons for every decision.

    `idle` maps each unused device to the reason. `longest_text_tokens` is less than the model's maximum if
    its longest text fits nowhere. `proposals` are changes that the user could make.
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
        """Return the devices that are used, replica by replica."""
        return tuple(device for replica in self.replicas for device in replica.devices)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that share a replica, and what it needs to find the others.

    `stage_layers` are the numbers of layers of all stages: one per rank, or a single one for all ranks
    together. `meeting_point` is the path of a file that does not exist yet, through which the ranks of one
    start find each other. `num_offloaded` layers are kept in main memory.
    """

    number: int
    world_size: int
    strategy: str
    stage_layers: tuple[int, ...]
    meeting_point: Path
    timeout_seconds: float
    num_offloaded: int = 0

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.world_size - 1

    @property
    def first_layer(self) -> int:
        """Return the index of the first layer that this rank has."""
        return sum(self.stage_layers[: self.number]) if STRATEGIES[self.strategy].has_stages else 0


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
            meeting_point,
            timeout_seconds,
            replica.num_offloaded,
        )
        for number in range(world_size)
    )


def draw_placement(placement: Placement) -> str:
    """Draw the plan as text, device by device, followed by its reasons.

    █ stands for weights, ▒ for activations of a full batch, · for headroom.
    """
    return draw_plan(placement_json(placement))


def placement_json(placement: Placement) -> dict[str, Any]:
    """Return the plan as a JSON object; bytes are integers."""
    body = {"relative_rate": placement.relative_rate, **msgspec.json.decode(msgspec.json.encode(placement))}
    return body | {"replicas": [replica_json(replica) for replica in placement.replicas]}


def part_json(placement: Placement, replica: Replica) -> dict[str, Any]:
    """Return one replica's part of a plan for its worker, with the plan's own sentences under `plan`."""
    plan = placement_json(placement)
    num_replicas = len(plan.pop("replicas"))
    return replica_json(replica) | {"plan": {"num_replicas": num_replicas, **plan}}


def replica_json(replica: Replica) -> dict[str, Any]:
    """Return one replica as a JSON object: its strategy, and what each device holds."""
    body: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(replica)
    )  # with lists, as a worker reads it
    for shard in (shard for stage in body["stages"] for shard in stage["shards"]):
        shard["headroom_bytes"] = shard["capacity_bytes"] - shard["weight_bytes"] - shard["activation_bytes"]
    return body | {"micro_batches": 1}  # read by clients of the release before, in which a batch was cut


@dataclass(frozen=True, slots=True)
class Assignment:
    """One replica and its devices, as the launcher passes them to a worker.

    The worker must not plan again, because its neighbours have meanwhile taken memory. `part` is the
    replica's part of the plan as `part_json` writes it; `devices` are in the replica's order.
    """

    part: Mapping[str, Any]
    devices: tuple[Device, ...]

    @property
    def replica(self) -> Replica:
        return msgspec.convert(self.part, Replica)

    @property
    def cores(self) -> frozenset[int]:
        """Return the logical processors of all devices; none for a GPU, whose feeding process is light."""
        return frozenset(core for device in self.devices for core in device.cores)


def write_assignment(assignment: Assignment) -> str:
    return msgspec.json.encode(assignment, order="deterministic").decode()


def read_assignment(text: str) -> Assignment:
    """Return the assignment that `write_assignment` wrote. Raise msgspec.DecodeError for anything else."""
    return msgspec.json.decode(text, type=Assignment)
