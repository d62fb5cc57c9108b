"""Schedule: when a collection is re-indexed, and what happens at a due time if a run is still active."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from vectormill.domain.errors import InvalidOption

SKIP: Final = "skip"  # a run in state `skipped` records the reason
QUEUE: Final = "queue"  # the new run waits until the other one has ended

Overlap = Literal["skip", "queue"]
OVERLAPS: Final[tuple[Overlap, ...]] = (SKIP, QUEUE)

# No real expression is longer, and the limit also bounds the digits of its numbers.
MAX_CRON_CHARS: Final = 200
MAX_TIMEZONE_CHARS: Final = 64
# The scheduler handles a due time within two seconds; later than this, no scheduler seems to be running.
OVERDUE_SECONDS: Final = 60.0

SCHEDULE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """A schedule to be created. `options` are those of its runs."""

    name: str
    collection: str
    cron: str
    timezone: str = "UTC"
    overlap: str = SKIP
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as read from the database at the time `now`, with a summary of its runs.

    A completed run counts as a success even if single rows failed. `num_failures` and `num_skipped` count
    runs since the last success, and `last_error` is the newest reason of a failure or skip since then.
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
        """Return the seconds since a due time without a run; more than a few mean that no scheduler runs."""
        if self.paused_at is not None or self.next_due_at is None:
            return 0.0
        return max((self.now - self.next_due_at).total_seconds(), 0.0)


@dataclass(frozen=True, slots=True)
class ScheduleCounts:
    """Numbers of schedules by state; paused schedules count neither as failing nor as overdue."""

    num_schedules: int
    num_paused: int
    num_failing: int
    num_overdue: int


def check_schedule_name(name: str) -> str:
    """Return the name of a schedule if it is valid. Raise InvalidOption, stating the rule, if not."""
    if not SCHEDULE_NAME.fullmatch(name):
        raise InvalidOption(
            f"Invalid schedule name {name[:80]!r}: use at most 63 letters, digits, '.', '_' and '-', starting with a "
            "letter, a digit or '_'."
        )
    return name


def check_overlap(overlap: str) -> str:
    """Return the overlap policy if it is one of OVERLAPS. Raise InvalidOption if not."""
    if overlap not in OVERLAPS:
        raise InvalidOption(f"Invalid overlap {overlap[:80]!r}: expected {' or '.join(OVERLAPS)}.")
    return overlap
