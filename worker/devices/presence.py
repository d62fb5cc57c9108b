"""Tell which GPUs of a machine are lost, and which are back, from one detection after another."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from worker.devices.device import CUDA, Device, Inventory, Links


class GpuPresence:
    """The GPUs that were ever there, and since when some are lost. Not thread-safe.

    A GPU is known by its UUID and keeps the name and the free memory of its first detection, so that the loss of one
    changes nothing about the others. A change counts once two detections in a row show it; after the first of them
    `is_in_doubt` is true. GPUs that were not there at the start are ignored unless `takes_new`.
    """

    def __init__(self, inventory: Inventory, *, takes_new: bool = True) -> None:
        self._known = inventory
        self._takes_new = takes_new
        self._doubted: frozenset[str] = frozenset()
        self.lost: dict[str, datetime] = {}

    @property
    def is_in_doubt(self) -> bool:
        return bool(self._doubted)

    @property
    def inventory(self) -> Inventory:
        """Return what is there now."""
        left = tuple(device for device in self._known.accelerators if device.uuid not in self.lost)
        return replace(self._known, accelerators=left)

    def describe_lost(self) -> dict[str, str]:
        """Return the names of the lost GPUs, each with its UUID and the time of its loss."""
        return {
            device.name: f"{device.name} ({uuid}) is lost since {self.lost[uuid]:%Y-%m-%d %H:%M} UTC"
            for uuid, device in _by_uuid(self._known).items()
            if uuid in self.lost
        }

    def compare(self, found: Inventory, now: datetime) -> bool:
        """Take note of a detection. Return True if GPUs are lost, back or new by it and by the one before."""
        known, there = _by_uuid(self._known), _by_uuid(found)
        seen = there.keys() if self._takes_new else there.keys() & known.keys()
        changed = frozenset((known.keys() - self.lost.keys()) ^ seen)
        confirmed, self._doubted = changed & self._doubted, changed - self._doubted
        for uuid in sorted(confirmed):
            if uuid not in there:
                self.lost[uuid] = now
            elif not self.lost.pop(uuid, None):
                self._add(there[uuid], found)
        return bool(confirmed)

    def _add(self, new: Device, found: Inventory) -> None:
        """Add a GPU that was not there at the start, under a name that no other has had."""
        names = {device.uuid: device.name for device in self._known.accelerators}
        numbers = range(len(names) + 1)
        name = next(f"{CUDA}:{number}" for number in numbers if f"{CUDA}:{number}" not in names.values())
        pairs = {
            frozenset((name, names[other.uuid])): found.links.between(new.name, other.name)
            for other in found.accelerators
            if other.uuid in names
        }
        links = Links(found.links.default, {**self._known.links.pairs, **pairs})
        accelerators = (*self._known.accelerators, replace(new, name=name))
        self._known = replace(self._known, accelerators=accelerators, links=links)


def _by_uuid(inventory: Inventory) -> Mapping[str, Device]:
    """Return the GPUs by UUID; AMD's have numbers instead, which change when one is lost."""
    gpus = (device for device in inventory.accelerators if device.kind == CUDA)
    return {device.uuid: device for device in gpus if device.uuid and not device.uuid.isdecimal()}
