"""Drafts: every plan that could be made for a fleet of devices, feasible or not. Chooses none, explains none."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from worker.devices.links import Links
from worker.placement.groups import group_rooms, sub_fleets
from worker.placement.placement import Replica
from worker.placement.replicas import ReplicaBuilder, TooTight
from worker.placement.sizes.room import Room
from worker.placement.strategies import HYBRID, REPLICATE, SHARED

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan in the running: its replicas, the rooms of its fleet that it leaves idle, and what could not be built."""

    strategy: str
    group_size: int
    replicas: tuple[Replica, ...]
    idle: Mapping[str, str]
    refusals: tuple[TooTight, ...] = ()

    @property
    def rate(self) -> float:
        return sum(replica.relative_rate for replica in self.replicas)

    @property
    def name(self) -> str:
        if self.strategy == REPLICATE:
            count = len(self.replicas)
            return f"{REPLICATE} on {count} device{'s' if count > 1 else ''}" if count else REPLICATE
        return f"{self.strategy} over {self.group_size}"


def draft_plans(
    rooms: Sequence[Room], links: Links, builder: ReplicaBuilder, strategy: str
) -> Iterator[Draft]:
    """Yield every strategy that is allowed, on every number of devices a replica, on all rooms and on fewer of them."""
    is_free = strategy in (AUTO, HYBRID)
    for fleet in sub_fleets(rooms, links):
        if is_free or strategy == REPLICATE:
            yield draft_replicas(fleet, builder)
        for shared in SHARED if is_free else {strategy} & set(SHARED):
            for size in range(2, len(fleet) + 1):
                yield _draft_groups(fleet, size, shared, links, builder)
                if is_free:
                    yield _draft_hybrid(fleet, size, shared, links, builder)


def draft_replicas(rooms: Sequence[Room], builder: ReplicaBuilder) -> Draft:
    """Draft a replica on every room that holds one alone."""
    built = {room.name: builder.build(REPLICATE, [room], "") for room in rooms}
    refused = {name: each for name, each in built.items() if isinstance(each, TooTight)}
    return Draft(
        REPLICATE,
        1,
        tuple(each for each in built.values() if isinstance(each, Replica)),
        {name: each.reason for name, each in refused.items()},
        tuple(refused.values()),
    )


def _draft_groups(
    rooms: Sequence[Room], size: int, strategy: str, links: Links, builder: ReplicaBuilder
) -> Draft:
    """Draft a replica on every group of `size` rooms."""
    replicas: list[Replica] = []
    refusals: list[TooTight] = []
    idle: dict[str, str] = {}
    groups = group_rooms(rooms, size, links)
    for group in groups:
        built = builder.build(strategy, group, links.slowest(room.name for room in group))
        if isinstance(built, Replica):
            replicas.append(built)
        else:
            refusals.append(built)
            idle |= dict.fromkeys((room.name for room in group), built.reason)
    grouped = {room.name for group in groups for room in group}
    for room in rooms:
        if room.name not in grouped:
            idle[room.name] = f"it is left over when devices are taken {size} at a time"
    return Draft(strategy, size, tuple(replicas), idle, tuple(refusals))


def _draft_hybrid(
    rooms: Sequence[Room], size: int, strategy: str, links: Links, builder: ReplicaBuilder
) -> Draft:
    """Draft a replica on every room that holds one alone, and shared ones on the others."""
    alone = draft_replicas(rooms, builder)
    tight = [room for room in rooms if room.name in alone.idle]
    shared = _draft_groups(tight, size, strategy, links, builder)
    if not alone.replicas or not shared.replicas:
        return Draft(HYBRID, size, (), {})
    return Draft(HYBRID, size, alone.replicas + shared.replicas, shared.idle, shared.refusals)
