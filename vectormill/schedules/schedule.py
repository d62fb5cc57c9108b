"""Schedule: when a collection is re-indexed, and what becomes of a due time while a run is still going on."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from vectormill.domain.errors import InvalidOption

SKIP: Final = "skip"  # the due time passes; the history says why
QUEUE: Final = "queue"  # its run waits until the other has ended

Overlap = Literal["skip", "queue"]
OVERLAPS: Final[tuple[Overlap, ...]] = (SKIP, QUEUE)

# Nobody writes a longer expression, and the digits of a number are bounded with it.
MAX_CRON_CHARS: Final = 200
MAX_TIMEZONE_CHARS: Final = 64

SCHEDULE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """A schedule to be made. `options` are those of the runs that it makes."""

    name: str
    collection: str
    cron: str
    timezone: str = "UTC"
    overlap: str = SKIP
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as it stands in the database at the moment `now`, with what its runs came to.

    A run that completed, even if single rows of it failed, is a success; `num_failures` and `num_skipped` count since
    the last one. `last_error` is the reason of the newest failure or skip since then.
    """

    id: int
    name: str
    collection: str
    cron: str
    timezone: str
    overlap: str
    options: Mapping[str, Any]
    next_due_at: datetime | None
    paused_at: datetime | None
    created_at: datetime
    updated_at: datetime
    last_state: str | None
    last_run_at: datetime | None
    last_success_at: datetime | None
    num_failures: int
    num_skipped: int
    last_error: str | None
    now: datetime

    @property
    def lag_seconds(self) -> float:
        """Return the seconds since the due time without a run: more than a few mean that no scheduler looks."""
        if self.paused_at is not None or self.next_due_at is None:
            return 0.0
        return max((self.now - self.next_due_at).total_seconds(), 0.0)


@dataclass(frozen=True, slots=True)
class ScheduleCounts:
    """The number of schedules by state: paused ones are neither failing nor overdue."""

    num_schedules: int
    num_paused: int
    num_failing: int
    num_overdue: int


def check_schedule_name(name: str) -> str:
    """Return the name if a schedule may have it. Raise InvalidOption with the rule."""
    if not SCHEDULE_NAME.fullmatch(name):
        raise InvalidOption(
            f"The schedule name {name[:80]!r} cannot be used: it has letters, digits, '.', '_' and '-', at most 63, "
            "and starts with a letter, a digit or '_'."
        )
    return name


def check_overlap(overlap: str) -> str:
    """Return the overlap if it is one of OVERLAPS. Raise InvalidOption."""
    if overlap not in OVERLAPS:
        raise InvalidOption(f"The overlap {overlap[:80]!r} is none of {' and '.join(OVERLAPS)}.")
    return overlap
