"""Assignment: one replica of a plan and the devices that it was planned for, as the launcher hands it to its worker.

A worker that planned again would plan another machine: what its neighbours have loaded meanwhile is no longer free.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from worker.devices.device import Device
from worker.placement.placement import Replica, Shard, Stage


@dataclass(frozen=True, slots=True)
class Assignment:
    """`part` is the replica's part of the plan as `part_json` writes it; `devices` are in the replica's order."""

    part: Mapping[str, Any]
    devices: tuple[Device, ...]

    @property
    def replica(self) -> Replica:
        return Replica(
            strategy=self.part["strategy"],
            stages=tuple(_read_stage(stage) for stage in self.part["stages"]),
            micro_batches=self.part["micro_batches"],
            max_batch_tokens=self.part["max_batch_tokens"],
            relative_rate=self.part["relative_rate"],
        )

    @property
    def cores(self) -> frozenset[int]:
        """Return the logical processors of all devices; none for a GPU, whose feeding process is light."""
        return frozenset(core for device in self.devices for core in device.cores)


def write_assignment(assignment: Assignment) -> str:
    devices = [asdict(device) | {"features": sorted(device.features)} for device in assignment.devices]
    return json.dumps({"part": assignment.part, "devices": devices})


def read_assignment(text: str) -> Assignment:
    """Return what `write_assignment` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    written = json.loads(text)
    return Assignment(written["part"], tuple(_read_device(device) for device in written["devices"]))


def _read_device(written: dict[str, Any]) -> Device:
    known = {"cores": tuple(written["cores"]), "features": frozenset(written["features"])}
    return Device(**written | known)


def _read_stage(written: dict[str, Any]) -> Stage:
    shards = (
        Shard(shard["device"], shard["capacity_bytes"], shard["weight_bytes"], shard["activation_bytes"])
        for shard in written["shards"]
    )
    return Stage(written["first_layer"], written["num_layers"], tuple(shards))
