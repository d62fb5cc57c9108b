"""Cron: when an expression of five fields falls due in a time zone. Knows no schedule and no clock.

Fields are read by cronsim, which follows Debian's cron. Where clocks change, two kinds of expressions are told apart,
as cron(8) does (https://manpages.debian.org/bookworm/cron/cron.8.en.html, "Notes"):

- *At a time*: neither the minute nor the hour begins with `*` ("0 2 * * *"). What a gap has skipped is due in the
  first minute after the gap, once however many times lay in it. What a repeat brings twice is due the first time only.
- *By the clock* ("*/15 * * * *", "30 * * * *", "0 */2 * * *"): due whenever the clock on the wall shows it. A time in
  a gap is not made up for, and one in a repeat is due twice; so an hourly run stays hourly.
"""

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from vectormill.domain.errors import InvalidOption
from vectormill.schedules.schedule import MAX_CRON_CHARS, MAX_TIMEZONE_CHARS

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
    """Return the expression in plain fields with one space between them, nicknames spelled out. Raise InvalidOption."""
    written = NICKNAMES.get(cron.strip().lower(), cron)
    fields = written.split()
    said = f"The cron expression {cron[:MAX_CRON_CHARS]!r} cannot be used: "
    if len(cron) > MAX_CRON_CHARS:
        raise InvalidOption(f"{said}it has more than {MAX_CRON_CHARS} characters.")
    if len(fields) != NUM_FIELDS:
        raise InvalidOption(
            f"{said}it has {len(fields)} fields, not {NUM_FIELDS}: minute, hour, day of the month, month, day of the "
            "week. '0 2 * * *' is two o'clock every night."
        )
    expression = " ".join(fields)
    try:
        next(CronSim(expression, datetime(2024, 1, 1)))  # noqa: DTZ001 - any moment of any clock on a wall
    except StopIteration:
        raise InvalidOption(f"{said}it does not fall due within 50 years.") from None
    except (CronSimError, ValueError, AssertionError) as error:
        reason = str(error).replace("Bad ", "there is something wrong with the ") or "it cannot be read"
        raise InvalidOption(
            f"{said}{reason}. The fields are minute (0-59), hour (0-23), day of the month (1-31), month (1-12) and day "
            "of the week (0-7, or SUN to SAT)."
        ) from error
    return expression


def find_timezone(name: str) -> ZoneInfo:
    """Return the zone of the tz database. Raise InvalidOption for a name that it does not have."""
    try:
        if len(name) <= MAX_TIMEZONE_CHARS and name.isascii() and name.isprintable():
            return ZoneInfo(name)
    except (OSError, ValueError, LookupError):  # a folder of the database; a path out of it; an unknown name
        pass
    raise InvalidOption(
        f"There is no time zone {name[:MAX_TIMEZONE_CHARS]!r}; use a name of the tz database, such as "
        "'Europe/Berlin' or 'UTC'."
    )


def next_due(cron: str, timezone: str, after: datetime) -> datetime:
    """Return the first time later than `after` at which the expression is due, in UTC; `after` is of any zone.

    Raise InvalidOption when the expression or the zone cannot be used.
    """
    return _next(check_cron(cron), find_timezone(timezone), after)


def newest_due(cron: str, timezone: str, first: datetime, now: datetime) -> datetime:
    """Return the last due time that is not after `now`, in UTC; `first` is a due time, however long ago.

    Looks back in windows that double, so that three missed years of an expression that is due every minute cost no more
    than one missed day.
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
    # As Debian's cron decides: from the first characters of the fields for minute and hour.
    minute, hour = expression.split()[:2]
    if minute.startswith("*") or hour.startswith("*"):
        return _next_by_the_clock(expression, zone, start)
    return _next_at_a_time(expression, zone, start)


def _next_at_a_time(expression: str, zone: tzinfo, start: datetime) -> datetime:
    for due in CronSim(expression, start.astimezone(zone)):
        # Asked within the second round of a repeat, cronsim goes on from the first.
        if due.astimezone(UTC) > start:
            return due.astimezone(UTC)
    raise InvalidOption(f"The cron expression {expression!r} does not fall due within 50 years.")


def _next_by_the_clock(expression: str, zone: ZoneInfo, start: datetime) -> datetime:
    """Return the next due time, one offset from UTC after the other: between two changes it is plain arithmetic.

    cronsim 2.8 itself goes in steps of whole hours, and on Lord Howe Island, whose clocks change by half an hour,
    misses what is due after a change.
    """
    offset = _offset(zone, start)
    while True:
        # A clock without changes: what it shows is written as if it were UTC.
        due = _next_at_a_time(expression, UTC, start + offset) - offset
        change = _find_change(zone, start + _SECOND, due, offset)
        if change is None:
            return due
        start, offset = change - _SECOND, _offset(zone, change)


def _find_change(zone: ZoneInfo, start: datetime, end: datetime, offset: timedelta) -> datetime | None:
    """Return the first second from `start` to `end` with another offset. No offset lasts less than a day."""
    before = start
    if _offset(zone, before) != offset:
        return before
    while before < end:
        after = min(before + _DAY, end)
        if _offset(zone, after) != offset:
            return _bisect_change(zone, before, after, offset)
        before = after
    return None


def _bisect_change(zone: ZoneInfo, before: datetime, after: datetime, offset: timedelta) -> datetime:
    while after - before > _SECOND:
        middle = (before + (after - before) / 2).replace(microsecond=0)
        if _offset(zone, middle) == offset:
            before = middle
        else:
            after = middle
    return after


def _offset(zone: ZoneInfo, moment: datetime) -> timedelta:
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None  # every ZoneInfo has one
    return offset
