"""Gates: limits on what is in progress at once. More is refused, naming the setting and when to try again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from api.problems import Limit, Problem
from vectormill.domain.errors import LimitReached
from vectormill.settings import Settings


class Gate:
    """Counts what is inside. Only the event loop counts, so no lock is needed."""

    def __init__(self, settings: Settings, setting: str, things: str) -> None:
        self._limit = Limit.of(settings, setting)
        self._things = things
        self.inside = 0

    @contextmanager
    def hold(self) -> "Iterator[Hold]":
        """Yield a hold that takes nothing yet; what it takes is given back at the end of the block."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self.inside -= hold.amount

    @property
    def is_full(self) -> bool:
        return self.inside >= self._limit.value

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count one more inside for the time of the block. Raises Problem when the gate is full."""
        with self.hold() as hold:
            hold.take(1)
            yield

    def _let_in(self, amount: int) -> None:
        if self.inside + amount > self._limit.value:
            raise Problem(
                429,
                LimitReached.code,
                f"This API process accepts at most {self._limit.value:,} {self._things} at once "
                f"({self._limit.setting}); "
                "try again in a moment.",
                limit=self._limit,
            )
        self.inside += amount


class Hold:
    """The share of a gate that one request has taken."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.amount = 0

    def take(self, amount: int) -> None:
        """Take so much more. Raises Problem when the gate has no room for it."""
        self._gate._let_in(amount)
        self.amount += amount


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of an API process. `json_bytes` are bodies in memory: what is made of them takes 16 times that."""

    requests: Gate
    logins: Gate
    uploads: Gate
    searches: Gate
    watchers: Gate
    puts: Gate
    json_bytes: Gate

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            requests=Gate(settings, "max_requests", "requests"),
            logins=Gate(settings, "max_logins", "logins"),
            uploads=Gate(settings, "max_uploads", "submissions"),
            searches=Gate(settings, "max_searches", "searches"),
            watchers=Gate(settings, "max_watchers", "watchers of jobs"),
            puts=Gate(settings, "max_waiting_puts", "puts that wait"),
            json_bytes=Gate(settings, "max_json_bytes_at_once", "bytes of JSON bodies"),
        )
