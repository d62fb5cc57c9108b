"""Schedule: when a collection is re-indexed, and what happens at a due time if a run is still active.

A cron expression of five fields in a time zone says when a schedule is due. cronsim parses the fields as Debian's cron
does. Two kinds of expressions are distinguished where clocks change, as in cron(8)
(https://manpages.debian.org/bookworm/cron/cron.8.en.html, "Notes"):

- *At a time*: neither the minute nor the hour begins with `*` ("0 2 * * *"). Times skipped by a gap are due once, in
  the first minute after the gap, however many there were. A time that a repeated hour shows twice is due the first
  time only.
- *By the clock* ("*/15 * * * *", "30 * * * *", "0 */2 * * *"): due whenever a local clock shows the time. A time in a
  gap is not made up for, and one in a repeated hour is due twice, so that an hourly run stays hourly.

No function reads a clock. cronsim is imported late, because the client, which has none, loads this module too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo

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


def check_overlap(overlap: str) -> str:
    """Return the overlap policy if it is one of OVERLAPS. Raise InvalidOption if not."""
    if overlap not in OVERLAPS:
        raise InvalidOption(f"Invalid overlap {overlap[:80]!r}: expected {' or '.join(OVERLAPS)}.")
    return overlap


NICKNAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
NUM_FIELDS: Final = 5

_SECOND: Final = timedelta(seconds=1)
_MINUTE: Final = timedelta(minutes=1)
_DAY: Final = timedelta(days=1)


def check_cron(cron: str) -> str:
    """Return the expression as five fields with single spaces, nicknames expanded. Raise InvalidOption."""
    from cronsim import CronSim, CronSimError

    written = NICKNAMES.get(cron.strip().lower(), cron)
    fields = written.split()
    said = f"Invalid cron expression {cron[:MAX_CRON_CHARS]!r}: "
    if len(cron) > MAX_CRON_CHARS:
        raise InvalidOption(f"{said}it has more than {MAX_CRON_CHARS} characters.")
    if len(fields) != NUM_FIELDS:
        raise InvalidOption(
            f"{said}it has {len(fields)} fields, not {NUM_FIELDS}: minute, hour, day of the month, month, day of the "
            "week. For example, '0 2 * * *' means two o'clock every night."
        )
    expression = " ".join(fields)
    try:
        next(CronSim(expression, datetime(2024, 1, 1)))  # noqa: DTZ001 - any local time will do
    except StopIteration:
        raise InvalidOption(f"{said}it does not match any time in the next 50 years.") from None
    except (CronSimError, ValueError, AssertionError) as error:
        reason = str(error).replace("Bad ", "invalid ") or "it cannot be parsed"
        raise InvalidOption(
            f"{said}{reason}. The fields are minute (0-59), hour (0-23), day of the month (1-31), month (1-12) and day "
            "of the week (0-7, or SUN to SAT)."
        ) from error
    return expression


def find_timezone(name: str) -> ZoneInfo:
    """Return a time zone of the tz database. Raise InvalidOption if the name is unknown."""
    try:
        if len(name) <= MAX_TIMEZONE_CHARS and name.isascii() and name.isprintable():
            return ZoneInfo(name)
    except (OSError, ValueError, LookupError):  # a folder of the database, a path outside, an unknown name
        pass
    raise InvalidOption(
        f"Unknown time zone {name[:MAX_TIMEZONE_CHARS]!r}; use a name from the tz database, such as 'Europe/Berlin' "
        "or 'UTC'."
    )


def next_due(cron: str, timezone: str, after: datetime) -> datetime:
    """Return the first due time of the expression after `after`, in UTC; `after` may be in any zone.

    Raise InvalidOption if the expression or the zone is invalid.
    """
    return _next(check_cron(cron), find_timezone(timezone), after)


def newest_due(cron: str, timezone: str, first: datetime, now: datetime) -> datetime:
    """Return the last due time that is not after `now`, in UTC. `first` is any earlier due time.

    The search goes back in windows that double, so that three missed years of an expression that is due every
    minute cost no more than one missed day.
    """
    expression, zone = check_cron(cron), find_timezone(timezone)
    window = _MINUTE
    found = None
    while found is None and now - window > first:
        candidate = _next(expression, zone, now - window)
        found = candidate if candidate <= now else None
        window *= 2
    newest = found or first.astimezone(UTC)
    while (later := _next(expression, zone, newest)) <= now:
        newest = later
    return newest


def _next(expression: str, zone: ZoneInfo, after: datetime) -> datetime:
    start = after.astimezone(UTC).replace(microsecond=0)
    # Debian's cron decides by the first characters of the minute and hour fields.
    minute, hour = expression.split()[:2]
    if minute.startswith("*") or hour.startswith("*"):
        return _next_by_the_clock(expression, zone, start)
    return _next_at_a_time(expression, zone, start)


def _next_at_a_time(expression: str, zone: tzinfo, start: datetime) -> datetime:
    from cronsim import CronSim

    for due in CronSim(expression, start.astimezone(zone)):
        # Within the second pass of a repeated hour, cronsim goes on from the first pass.
        if due.astimezone(UTC) > start:
            return due.astimezone(UTC)
    raise InvalidOption(f"The cron expression {expression!r} does not match any time in the next 50 years.")


def _next_by_the_clock(expression: str, zone: ZoneInfo, start: datetime) -> datetime:
    """Return the next due time of an expression by the clock.

    Between two changes of the UTC offset this is plain arithmetic, done one offset at a time. cronsim 2.8
    steps by whole hours and misses times after a change on Lord Howe Island, whose clocks change by half an
    hour.
    """
    offset = _offset(zone, start)
    while True:
        # With a fixed offset, local time is computed as if it were UTC.
        due = _next_at_a_time(expression, UTC, start + offset) - offset
        change = _find_change(zone, start + _SECOND, due, offset)
        if change is None:
            return due
        start, offset = change - _SECOND, _offset(zone, change)


def _find_change(zone: ZoneInfo, start: datetime, end: datetime, offset: timedelta) -> datetime | None:
    """Return the first second from `start` to `end` with another UTC offset; None if there is none.

    The search assumes that every offset lasts at least a day.
    """
    before = start
    if _offset(zone, before) != offset:
        return before
    while before < end:
        after = min(before + _DAY, end)
        if _offset(zone, after) != offset:
            while after - before > _SECOND:
                middle = (before + (after - before) / 2).replace(microsecond=0)
                if _offset(zone, middle) == offset:
                    before = middle
                else:
                    after = middle
            return after
        before = after
    return None


def _offset(zone: ZoneInfo, moment: datetime) -> timedelta:
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None  # a ZoneInfo always has an offset
    return offset
