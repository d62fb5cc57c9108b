"""Ledger: the rule of order as a plain model. The newest write of a key wins in every generation, whoever carries it.

Knows nothing of Postgres: a write has a place, and whoever keeps a ledger says which generations it is meant for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

# A text, and its metadata as JSON; None where nothing is to be under the key.
Value = tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Write:
    """What somebody wrote under a key. One that is not certain may have been left out, or may be made up for."""

    place: int
    value: Value
    is_certain: bool = True
    is_removal: bool = False  # what a run left out of this generation alone: nothing tells an older job


@dataclass(slots=True)
class Ledger:
    """All writes that are meant for one generation, by key."""

    writes: dict[str, list[Write]] = field(default_factory=dict)

    def add(self, key: str, write: Write) -> None:
        self.writes.setdefault(key, []).append(write)

    def copy_from(self, other: "Ledger", places: Iterable[int] | None = None) -> None:
        """Takes over what this one has not: all of it, or deletions and what was written in one of these places.

        What a run left out of one generation is no write in another.
        """
        wanted = None if places is None else set(places)
        for key, writes in other.writes.items():
            for write in writes:
                is_wanted = (
                    wanted is None or write.place in wanted or (write.value is None and not write.is_removal)
                )
                if is_wanted and not any(own.place == write.place for own in self.writes.get(key, [])):
                    self.add(key, replace(write, is_certain=write.is_certain and not write.is_removal))

    def put(self, key: str, write: Write) -> None:
        """Adds a write, in place of one that has its place."""
        self.take_out(key, write.place)
        self.add(key, write)

    def take_out(self, key: str, place: int) -> None:
        self.writes[key] = [write for write in self.writes.get(key, []) if write.place != place]

    def list_at(self, place: int) -> list[tuple[str, Write]]:
        return [
            (key, write) for key, writes in self.writes.items() for write in writes if write.place == place
        ]

    def allowed(self, key: str) -> set[Value]:
        """What may be under the key when nothing is open: the newest certain write, or a doubtful one behind it."""
        found: set[Value] = set()
        for write in sorted(self.writes.get(key, []), key=lambda write: -write.place):
            found.add(write.value)
            if write.is_certain:
                return found
        return found | {None}
