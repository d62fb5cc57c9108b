"""States: what something can be in, how pages show it, and named sets of states for Python and for composed SQL."""

from dataclasses import dataclass
from typing import Final

# The tone of a state, which is its CSS class in the console.
IDLE: Final = "idle"
WAITING: Final = "waiting"
ACTIVE: Final = "active"
GOOD: Final = "good"
MIXED: Final = "mixed"
BAD: Final = "bad"


@dataclass(frozen=True, slots=True)
class State:
    """A state and the tone in which pages show it. A job, a run and a generation add what holds in it."""

    name: str
    tone: str = IDLE


class States(tuple[str, ...]):
    """A tuple of state names that formats as a SQL list: `f"state IN {OPEN}"`."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"({', '.join(map(repr, self))})"
