"""Draft every plan that could be made for a set of devices, whether it fits or not.

It neither chooses nor explains any. Devices with fast links between them are the first to share a replica.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Final

from worker.devices.device import BYTES_PER_SECOND, CPU, LINK_KINDS, Links
from worker.placement.placement import AUTO, Replica
from worker.placement.replicas import DoesNotFit, ReplicaBuilder
from worker.placement.room import DeviceCapacity
from worker.placement.strategies import HYBRID, OFFLOAD, REPLICATE, SHARED, STRATEGIES

# The largest number of subsets of devices that are tried: eight devices of four classes have 81.
MOST_FLEETS = 128

# With more devices than these, no plan that leaves some idle is tried, because grouping them leaves some idle anyway.
MOST_LEFT_IDLE: Final = 16

# Predictions are no more exact than this, so a simpler plan that is nearly as fast is preferred.
ABOUT_AS_FAST: Final = 0.95
NO_SHARE: Final = "the others need its share of main memory"

Group = tuple[DeviceCapacity, ...]


def group_rooms(rooms: Sequence[DeviceCapacity], size: int, links: Links) -> list[Group]:
    """Group devices of one kind by `size`, first within islands of the fastest links. Some may be left over.

    Parts of one GPU are spread over different groups, because they cannot share a replica.
    """
    groups: list[Group] = []
    counts: Counter[str] = Counter()

    def place(room: DeviceCapacity) -> int:
        counts[room.card] += bool(room.card)
        return counts[room.card]

    left = sorted(rooms, key=lambda room: (room.kind, -room.capacity_bytes, place(room), room.name))
    for kind in sorted(LINK_KINDS, key=BYTES_PER_SECOND.__getitem__, reverse=True):
        remaining: list[DeviceCapacity] = []
        for island in find_islands(left, links, BYTES_PER_SECOND[kind]):
            whole = len(island) - len(island) % size
            groups += [tuple(island[start : start + size]) for start in range(0, whole, size)]
            remaining += island[whole:]
        left = remaining
    return groups


def find_islands(
    rooms: Sequence[DeviceCapacity], links: Links, bytes_per_second: float
) -> list[list[DeviceCapacity]]:
    """Return the groups of devices of one kind that are connected by links of at least this speed.

    Devices keep the given order.
    """
    islands: list[list[DeviceCapacity]] = []
    for room in rooms:
        apart: list[list[DeviceCapacity]] = []
        joined: list[list[DeviceCapacity]] = []
        for island in islands:
            is_reached = any(
                other.kind == room.kind
                and BYTES_PER_SECOND[links.between(room.name, other.name)] >= bytes_per_second
                for other in island
            )
            (joined if is_reached else apart).append(island)
        islands = [*apart, [*chain.from_iterable(joined), room]]
    return islands


def sub_fleets(rooms: Sequence[DeviceCapacity], links: Links) -> Iterator[list[DeviceCapacity]]:
    """Yield the distinct subsets of the devices, the full set first: leaving a device idle may be fastest.

    Devices of equal memory, speed and island are interchangeable, so subsets differ only in the number taken
    of each class.
    """
    if len(rooms) > MOST_LEFT_IDLE:
        yield list(rooms)
        return
    classes: dict[tuple[int, DeviceCapacity], list[DeviceCapacity]] = {}
    fastest = max(BYTES_PER_SECOND[kind] for kind in LINK_KINDS)
    islands = find_islands(rooms, links, fastest)
    for number, island in enumerate(islands):
        for room in island:
            # A device alone on its island differs from others only by its kind, memory and speed.
            place = number if len(island) > 1 else -1
            classes.setdefault((place, room), []).append(room)
    members = list(classes.values())
    counts = product(*(range(len(each), -1, -1) for each in members))
    for taken, _ in zip(counts, range(MOST_FLEETS), strict=False):
        fleet = [room for each, count in zip(members, taken, strict=True) for room in each[:count]]
        if fleet:
            yield fleet


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate plan: its replicas, the devices that it leaves idle, and what could not be built."""

    strategy: str
    group_size: int
    replicas: tuple[Replica, ...]
    idle: dict[str, str]
    refusals: tuple[DoesNotFit, ...] = ()

    @property
    def rate(self) -> float:
        return sum(replica.relative_rate for replica in self.replicas)

    @property
    def name(self) -> str:
        if self.group_size == 1:
            count = len(self.replicas)
            return f"{self.strategy} on {count} device{'s' if count > 1 else ''}" if count else self.strategy
        return f"{self.strategy} over {self.group_size}"


def choose_draft(drafts: Sequence[Draft]) -> Draft:
    """Return the simplest of the plans that are about as fast as the fastest."""
    least = ABOUT_AS_FAST * max(draft.rate for draft in drafts)
    near = [draft for draft in drafts if draft.replicas and draft.rate >= least]
    return min(
        near, key=lambda draft: (list(STRATEGIES).index(draft.strategy), draft.group_size, -draft.rate)
    )


def draft_plans(
    rooms: Sequence[DeviceCapacity], links: Links, builder: ReplicaBuilder, strategy: str
) -> Iterator[Draft]:
    """Yield a draft for every allowed strategy, number of devices per replica, and subset of the devices."""
    if strategy == OFFLOAD:
        largest_first = sorted(rooms, key=lambda room: (room.kind == CPU, -room.capacity_bytes))
        for number in range(len(rooms), 0, -1):
            used = [replace(room, host_bytes=room.host_bytes // number) for room in largest_first[:number]]
            draft = draft_replicas(used, builder, OFFLOAD)
            others = (room.name for room in largest_first[number:])
            yield replace(draft, idle=draft.idle | dict.fromkeys(others, NO_SHARE))
        return
    shares = SHARED if strategy in (AUTO, HYBRID) else tuple({strategy} & set(SHARED))
    # Where every device is used in full by a replica of its own, nothing is faster; other plans are drafted to be told.
    is_best_alone = strategy == AUTO and draft_replicas(rooms, builder).rate >= sum(
        map(builder.full_rate, rooms)
    )
    for fleet in [rooms] if is_best_alone else sub_fleets(rooms, links):
        alone = draft_replicas(fleet, builder)
        tight = [room for room in fleet if room.name in alone.idle]
        if strategy in (AUTO, REPLICATE):
            yield alone
        # Parts of one GPU share no replica, so larger groups than GPUs need not be tried.
        largest = min(len(fleet), max(2, len({room.card or room.name for room in fleet}))) if shares else 0
        for size in range(2, largest + 1):
            groups = group_rooms(fleet, size, links) if strategy != HYBRID else []
            rest = group_rooms(tight, size, links) if alone.replicas and strategy in (AUTO, HYBRID) else []
            for shared in shares:
                if groups:
                    yield _draft_groups(fleet, groups, shared, links, builder)
                if rest:
                    mix = _draft_groups(tight, rest, shared, links, builder)
                    both = mix.replicas and alone.replicas + mix.replicas
                    yield replace(mix, strategy=HYBRID, replicas=both)


def draft_replicas(
    rooms: Sequence[DeviceCapacity], builder: ReplicaBuilder, strategy: str = REPLICATE
) -> Draft:
    """Draft a replica on every device that can hold one alone."""
    built = {room.name: builder.build(strategy, (room,), "") for room in rooms}
    refused = {name: each for name, each in built.items() if isinstance(each, DoesNotFit)}
    return Draft(
        strategy,
        1,
        tuple(each for each in built.values() if isinstance(each, Replica)),
        {name: each.reason for name, each in refused.items()},
        tuple(refused.values()),
    )


def _draft_groups(
    rooms: Sequence[DeviceCapacity],
    groups: Sequence[Group],
    strategy: str,
    links: Links,
    builder: ReplicaBuilder,
) -> Draft:
    """Draft a shared replica on every group, all of which have as many devices."""
    size = len(groups[0])
    idle = {room.name: f"it is left over when devices are grouped {size} at a time" for room in rooms}
    replicas: list[Replica] = []
    refusals: list[DoesNotFit] = []
    for group in groups:
        built = builder.build(strategy, group, links.slowest(room.name for room in group))
        if isinstance(built, Replica):
            replicas.append(built)
            idle = {name: why for name, why in idle.items() if name not in built.devices}
        else:
            refusals.append(built)
            idle |= dict.fromkeys((room.name for room in group), built.reason)
    return Draft(strategy, size, tuple(replicas), idle, tuple(refusals))


def draft_longest(
    rooms: Sequence[DeviceCapacity],
    links: Links,
    make_builder: Callable[[int], ReplicaBuilder],
    strategy: str,
    max_tokens: int,
) -> tuple[int, list[Draft]]:
    """Return the longest text for which plans fit, at most `max_tokens`, with their drafts; 0 if none fits.

    Layers are kept in main memory where nothing else fits, unless another strategy is requested.
    `make_builder` returns the builder of replicas that hold a text of that many tokens.
    """
    drafts = list(draft_plans(rooms, links, make_builder(max_tokens), strategy))
    shorter = {refusal.longest_text_tokens for draft in drafts for refusal in draft.refusals} - {0}
    for tokens in [max_tokens, *sorted(shorter, reverse=True)]:
        if tokens < max_tokens:
            drafts = list(draft_plans(rooms, links, make_builder(tokens), strategy))
        if any(draft.replicas for draft in drafts):
            return tokens, drafts
    return draft_longest(rooms, links, make_builder, OFFLOAD, max_tokens) if strategy == AUTO else (0, drafts)
