"""List every plan that could be made for a set of devices, whether it fits or not.

It neither chooses nor explains any. Devices with fast links between them are the first to share a replica.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Final

from worker.devices.device import BYTES_PER_SECOND, CPU, LINK_KINDS, Links
from worker.placement.capacity import DeviceCapacity
from worker.placement.placement import AUTO, Replica
from worker.placement.replicas import DoesNotFit, ReplicaBuilder
from worker.placement.strategies import HYBRID, OFFLOAD, REPLICATE, SHARED, STRATEGIES

# The largest number of subsets of devices that are tried: eight devices of four classes have 81.
MOST_FLEETS = 128

# With more devices than these, no plan that leaves some idle is tried, because grouping them leaves some idle anyway.
MOST_LEFT_IDLE: Final = 16

# Predictions are no more exact than this, so a simpler plan that is nearly as fast is preferred.
ABOUT_AS_FAST: Final = 0.95
NO_SHARE: Final = "the others need its share of main memory"

Group = tuple[DeviceCapacity, ...]


def group_devices(devices: Sequence[DeviceCapacity], size: int, links: Links) -> list[Group]:
    """Group devices of one kind by `size`, first within islands of the fastest links. Some may be left over.

    Parts of one GPU are spread over different groups, because they cannot share a replica.
    """
    groups: list[Group] = []
    counts: Counter[str] = Counter()

    def place(device: DeviceCapacity) -> int:
        counts[device.card] += bool(device.card)
        return counts[device.card]

    left = sorted(
        devices, key=lambda device: (device.kind, -device.capacity_bytes, place(device), device.name)
    )
    for kind in sorted(LINK_KINDS, key=BYTES_PER_SECOND.__getitem__, reverse=True):
        remaining: list[DeviceCapacity] = []
        for island in find_islands(left, links, BYTES_PER_SECOND[kind]):
            whole = len(island) - len(island) % size
            groups += [tuple(island[start : start + size]) for start in range(0, whole, size)]
            remaining += island[whole:]
        left = remaining
    return groups


def find_islands(
    devices: Sequence[DeviceCapacity], links: Links, bytes_per_second: float
) -> list[list[DeviceCapacity]]:
    """Return the groups of devices of one kind that are connected by links of at least this speed.

    Devices keep the given order.
    """
    islands: list[list[DeviceCapacity]] = []
    for device in devices:
        apart: list[list[DeviceCapacity]] = []
        joined: list[list[DeviceCapacity]] = []
        for island in islands:
            is_reached = any(
                other.kind == device.kind
                and BYTES_PER_SECOND[links.between(device.name, other.name)] >= bytes_per_second
                for other in island
            )
            (joined if is_reached else apart).append(island)
        islands = [*apart, [*chain.from_iterable(joined), device]]
    return islands


def sub_fleets(devices: Sequence[DeviceCapacity], links: Links) -> Iterator[list[DeviceCapacity]]:
    """Yield the distinct subsets of the devices, the full set first: leaving a device idle may be fastest.

    Devices of equal memory, speed and island are interchangeable, so subsets differ only in the number taken
    of each class.
    """
    if len(devices) > MOST_LEFT_IDLE:
        yield list(devices)
        return
    classes: dict[tuple[int, DeviceCapacity], list[DeviceCapacity]] = {}
    fastest = max(BYTES_PER_SECOND[kind] for kind in LINK_KINDS)
    islands = find_islands(devices, links, fastest)
    for number, island in enumerate(islands):
        for device in island:
            # A device alone on its island differs from others only by its kind, memory and speed.
            place = number if len(island) > 1 else -1
            classes.setdefault((place, device), []).append(device)
    members = list(classes.values())
    counts = product(*(range(len(each), -1, -1) for each in members))
    for taken, _ in zip(counts, range(MOST_FLEETS), strict=False):
        fleet = [device for each, count in zip(members, taken, strict=True) for device in each[:count]]
        if fleet:
            yield fleet


@dataclass(frozen=True, slots=True)
class Candidate:
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


def choose_candidate(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest of the plans that are about as fast as the fastest."""
    least = ABOUT_AS_FAST * max(candidate.rate for candidate in candidates)
    near = [candidate for candidate in candidates if candidate.replicas and candidate.rate >= least]
    return min(
        near,
        key=lambda candidate: (
            list(STRATEGIES).index(candidate.strategy),
            candidate.group_size,
            -candidate.rate,
        ),
    )


def list_candidates(
    devices: Sequence[DeviceCapacity], links: Links, builder: ReplicaBuilder, strategy: str
) -> Iterator[Candidate]:
    """Yield a candidate for every allowed strategy, number of devices per replica, and subset of the devices."""
    if strategy == OFFLOAD:
        largest_first = sorted(devices, key=lambda device: (device.kind == CPU, -device.capacity_bytes))
        for number in range(len(devices), 0, -1):
            used = [
                replace(device, host_bytes=device.host_bytes // number) for device in largest_first[:number]
            ]
            candidate = build_alone(used, builder, OFFLOAD)
            others = (device.name for device in largest_first[number:])
            yield replace(candidate, idle=candidate.idle | dict.fromkeys(others, NO_SHARE))
        return
    shares = SHARED if strategy in (AUTO, HYBRID) else tuple({strategy} & set(SHARED))
    # Where every device is used in full by a replica of its own, nothing is faster; other plans are made to be told.
    is_best_alone = strategy == AUTO and build_alone(devices, builder).rate >= sum(
        map(builder.full_rate, devices)
    )
    for fleet in [devices] if is_best_alone else sub_fleets(devices, links):
        alone = build_alone(fleet, builder)
        tight = [device for device in fleet if device.name in alone.idle]
        if strategy in (AUTO, REPLICATE):
            yield alone
        # Parts of one GPU share no replica, so larger groups than GPUs need not be tried.
        largest = (
            min(len(fleet), max(2, len({device.card or device.name for device in fleet}))) if shares else 0
        )
        for size in range(2, largest + 1):
            groups = group_devices(fleet, size, links) if strategy != HYBRID else []
            rest = group_devices(tight, size, links) if alone.replicas and strategy in (AUTO, HYBRID) else []
            for shared in shares:
                if groups:
                    yield _build_groups(fleet, groups, shared, links, builder)
                if rest:
                    mix = _build_groups(tight, rest, shared, links, builder)
                    both = mix.replicas and alone.replicas + mix.replicas
                    yield replace(mix, strategy=HYBRID, replicas=both)


def build_alone(
    devices: Sequence[DeviceCapacity], builder: ReplicaBuilder, strategy: str = REPLICATE
) -> Candidate:
    """Return the plan with a replica on every device that can hold one alone."""
    built = {device.name: builder.build(strategy, (device,), "") for device in devices}
    refused = {name: each for name, each in built.items() if isinstance(each, DoesNotFit)}
    return Candidate(
        strategy,
        1,
        tuple(each for each in built.values() if isinstance(each, Replica)),
        {name: each.reason for name, each in refused.items()},
        tuple(refused.values()),
    )


def _build_groups(
    devices: Sequence[DeviceCapacity],
    groups: Sequence[Group],
    strategy: str,
    links: Links,
    builder: ReplicaBuilder,
) -> Candidate:
    """Return the plan with a shared replica on every group, all of which have as many devices."""
    size = len(groups[0])
    idle = {device.name: f"it is left over when devices are grouped {size} at a time" for device in devices}
    replicas: list[Replica] = []
    refusals: list[DoesNotFit] = []
    for group in groups:
        built = builder.build(strategy, group, links.slowest(device.name for device in group))
        if isinstance(built, Replica):
            replicas.append(built)
            idle = {name: why for name, why in idle.items() if name not in built.devices}
        else:
            refusals.append(built)
            idle |= dict.fromkeys((device.name for device in group), built.reason)
    return Candidate(strategy, size, tuple(replicas), idle, tuple(refusals))


def find_longest_text(
    devices: Sequence[DeviceCapacity],
    links: Links,
    make_builder: Callable[[int], ReplicaBuilder],
    strategy: str,
    max_tokens: int,
) -> tuple[int, list[Candidate]]:
    """Return the longest text for which plans fit, at most `max_tokens`, with their candidates; 0 if none fits.

    Layers are kept in main memory where nothing else fits, unless another strategy is requested.
    `make_builder` returns the builder of replicas that hold a text of that many tokens.
    """
    candidates = list(list_candidates(devices, links, make_builder(max_tokens), strategy))
    shorter = {refusal.longest_text_tokens for candidate in candidates for refusal in candidate.refusals} - {
        0
    }
    for tokens in [max_tokens, *sorted(shorter, reverse=True)]:
        if tokens < max_tokens:
            candidates = list(list_candidates(devices, links, make_builder(tokens), strategy))
        if any(candidate.replicas for candidate in candidates):
            return tokens, candidates
    return (
        find_longest_text(devices, links, make_builder, OFFLOAD, max_tokens)
        if strategy == AUTO
        else (0, candidates)
    )
