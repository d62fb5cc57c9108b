"""Find out which GPUs of a machine are lost, and which are back, by comparing one detection with the next."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from worker.devices.device import CUDA, Device, Inventory, Links

# How long a GPU that was lost twice must stay to count as back; doubled by each loss, and forgotten after the longest.
FIRST_PAUSE: Final = timedelta(minutes=1)
LONGEST_PAUSE: Final = timedelta(hours=1)


class GpuPresence:
    """The GPUs that were ever there, and since when some are lost. Not thread-safe.

    A GPU is known by its UUID and keeps the name and the free memory of its first detection, so that the loss of one
    changes nothing about the others. A change counts once two detections in a row show it; after the first of them
    `is_in_doubt` is true. A GPU that is lost again and again must stay longer each time before it counts as back.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._known = inventory
        self._doubted: frozenset[str] = frozenset()
        self._pauses: dict[str, timedelta] = {}
        # Since when a lost GPU is seen again without a break, and since when one that was lost counts as back.
        self._since: dict[str, datetime] = {}
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
        """Return the names of the lost GPUs, each with its UUID, the time of its loss, and how long it must stay."""
        return {
            device.name: f"{device.name} ({uuid}) is lost since {self.lost[uuid]:%Y-%m-%d %H:%M} UTC"
            + (f", and must stay for {pause // FIRST_PAUSE} min" if (pause := self._pauses[uuid]) else "")
            for uuid, device in _by_uuid(self._known).items()
            if uuid in self.lost
        }

    def compare(self, found: Inventory, now: datetime) -> bool:
        """Take note of a detection. Return True if GPUs are lost, back or new by it and by the one before."""
        known, there = _by_uuid(self._known), _by_uuid(found)
        for uuid in self.lost.keys() - there.keys():
            self._since.pop(uuid, None)
        waiting = {
            uuid
            for uuid in self.lost.keys() & there.keys()
            if now - self._since.setdefault(uuid, now) < self._pauses[uuid]
        }
        changed = frozenset((known.keys() - self.lost.keys()) ^ (there.keys() - waiting))
        confirmed, self._doubted = changed & self._doubted, changed - self._doubted
        for uuid in sorted(confirmed):
            if uuid not in there:
                since, pause = self._since.pop(uuid, None), self._pauses.get(uuid, timedelta())
                is_first = since is None or now - since >= LONGEST_PAUSE
                self._pauses[uuid] = (
                    timedelta() if is_first else min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
                )
                self.lost[uuid] = now
            else:
                self._since[uuid] = now
                if not self.lost.pop(uuid, None):
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
