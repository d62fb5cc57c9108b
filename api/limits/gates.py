"""Gates: limits on concurrent work.

What exceeds a limit is refused; the error names the setting and when to try again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from api.problems import Limit, Problem
from vectormill.domain.errors import LimitReached
from vectormill.settings import Settings


class Gate:
    """A limit on concurrent work. It is used by the event loop alone, so it needs no lock."""

    def __init__(self, settings: Settings, setting: str, things: str) -> None:
        self._limit = Limit.of(settings, setting)
        self._things = things
        self.inside = 0

    @contextmanager
    def hold(self) -> "Iterator[Hold]":
        """Yield a Hold with amount 0; whatever it takes is released at the end of the block."""
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
        """Take 1 for the duration of the block. Raise Problem if the gate is full."""
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
    """The amount of a gate's limit that one request has taken."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.amount = 0

    def take(self, amount: int) -> None:
        """Take `amount` more. Raise Problem if that exceeds the gate's limit."""
        self._gate._let_in(amount)
        self.amount += amount


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of an API process.

    `json_bytes` limits JSON bodies in memory, whose objects take 16 times as much.
    """

    requests: Gate
    logins: Gate
    uploads: Gate
    quotes: Gate
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
            quotes=Gate(settings, "max_quotes", "quotes of sources, re-indexes and objects"),
            searches=Gate(settings, "max_searches", "searches"),
            watchers=Gate(settings, "max_watchers", "watchers of jobs"),
            puts=Gate(settings, "max_waiting_puts", "waiting puts"),
            json_bytes=Gate(settings, "max_json_bytes_at_once", "bytes of JSON bodies"),
        )
