"""Groups: which devices share a replica; those with fast links between them come together. Knows no models."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from worker.devices.links import BYTES_PER_SECOND, LINK_KINDS, Links
from worker.placement.sizes.room import Room

# More sub-fleets than this are not looked at: eight devices of four classes have 81.
MOST_FLEETS = 128

Group = tuple[Room, ...]


def group_rooms(rooms: Sequence[Room], size: int, links: Links) -> list[Group]:
    """Group rooms of one kind by `size`, within islands of the fastest links first, then across. Some may be left over.

    Parts of one GPU are dealt out to different groups, since they cannot share a replica.
    """
    groups: list[Group] = []
    places = find_places(rooms)
    left = sorted(
        rooms, key=lambda room: (room.kind, -room.capacity_bytes, places.get(room.name, 0), room.name)
    )
    for kind in sorted(LINK_KINDS, key=BYTES_PER_SECOND.__getitem__, reverse=True):
        remaining: list[Room] = []
        for island in find_islands(left, links, BYTES_PER_SECOND[kind]):
            whole = len(island) - len(island) % size
            groups += [tuple(island[start : start + size]) for start in range(0, whole, size)]
            remaining += island[whole:]
        left = remaining
    return groups


def find_places(rooms: Sequence[Room]) -> dict[str, int]:
    """Number the parts of each partitioned GPU by name; whole GPUs are left out."""
    places: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for room in rooms:
        if room.card:
            places[room.name] = counts[room.card]
            counts[room.card] += 1
    return places


def find_islands(rooms: Sequence[Room], links: Links, bytes_per_second: float) -> list[list[Room]]:
    """Return rooms of one kind that reach each other over links at least as fast; in the order of the rooms given."""
    islands: list[list[Room]] = []
    for room in rooms:
        reached = [
            island
            for island in islands
            if any(
                other.kind == room.kind
                and BYTES_PER_SECOND[links.between(room.name, other.name)] >= bytes_per_second
                for other in island
            )
        ]
        merged = [other for island in reached for other in island] + [room]
        islands = [island for island in islands if island not in reached] + [merged]
    return islands


def sub_fleets(rooms: Sequence[Room], links: Links) -> Iterator[list[Room]]:
    """Yield the rooms, and the choices of fewer of them that differ: a plan that leaves a device idle may be the
    fastest.

    Rooms of one size, speed and island are interchangeable, so only how many of each class are taken makes a choice.
    """
    classes: dict[object, list[Room]] = {}
    fastest = max(BYTES_PER_SECOND[kind] for kind in LINK_KINDS)
    islands = find_islands(rooms, links, fastest)
    for number, island in enumerate(islands):
        for room in island:
            # A room alone on its island differs from others only by what it is.
            place = number if len(island) > 1 else -1
            classes.setdefault((place, room.kind, room.capacity_bytes, room.flops), []).append(room)
    members = list(classes.values())
    counts = product(*(range(len(each), -1, -1) for each in members))
    for taken, _ in zip(counts, range(MOST_FLEETS), strict=False):
        fleet = [room for each, count in zip(members, taken, strict=True) for room in each[:count]]
        if fleet:
            yield fleet
