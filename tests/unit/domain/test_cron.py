"""When expressions fall due: the two days of each year on which clocks change, as cron users expect them."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from vectormill.domain.errors import InvalidOption
from vectormill.schedules.schedule import check_cron, find_timezone, newest_due, next_due


def due_times(cron: str, zone: str, first: str, count: int) -> list[str]:
    """The due times after a moment of the zone's own clock, as that clock and its offset show them."""
    moment = datetime.fromisoformat(first).replace(tzinfo=ZoneInfo(zone))
    times = []
    for _ in range(count):
        moment = next_due(cron, zone, moment)
        times.append(moment.astimezone(ZoneInfo(zone)).strftime("%d %H:%M %z"))
    return times


BERLIN, NEW_YORK, LORD_HOWE, KOLKATA = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kolkata",
)


@pytest.mark.parametrize(
    ("zone", "cron", "first", "expected"),
    [
        # Berlin, 29 March 2026: 02:00 to 03:00 does not exist.
        (BERLIN, "0 2 * * *", "2026-03-28T12:00", ["29 03:00 +0200", "30 02:00 +0200"]),  # made up for, at once
        (BERLIN, "0,30 2 * * *", "2026-03-28T12:00", ["29 03:00 +0200", "30 02:00 +0200"]),  # once for both
        (BERLIN, "0 3 * * *", "2026-03-28T12:00", ["29 03:00 +0200", "30 03:00 +0200"]),
        (BERLIN, "30 1 * * *", "2026-03-28T12:00", ["29 01:30 +0100", "30 01:30 +0200"]),
        (BERLIN, "30 * * * *", "2026-03-29T01:00", ["29 01:30 +0100", "29 03:30 +0200"]),  # an hour apart
        (BERLIN, "*/30 2 * * *", "2026-03-28T12:00", ["30 02:00 +0200", "30 02:30 +0200"]),  # not made up for
        (BERLIN, "0 */2 * * *", "2026-03-29T00:00", ["29 04:00 +0200", "29 06:00 +0200"]),
        # Berlin, 25 October 2026: 02:00 to 03:00 comes twice.
        (BERLIN, "30 2 * * *", "2026-10-24T12:00", ["25 02:30 +0200", "26 02:30 +0100"]),  # once, the first
        (BERLIN, "0 3 * * *", "2026-10-24T12:00", ["25 03:00 +0100", "26 03:00 +0100"]),
        (BERLIN, "30 * * * *", "2026-10-25T02:00", ["25 02:30 +0200", "25 02:30 +0100"]),  # an hour apart
        (BERLIN, "0 */2 * * *", "2026-10-25T01:00", ["25 02:00 +0200", "25 02:00 +0100", "25 04:00 +0100"]),
        # New York, 8 March and 1 November 2026.
        (NEW_YORK, "30 2 * * *", "2026-03-07T12:00", ["08 03:00 -0400", "09 02:30 -0400"]),
        (NEW_YORK, "*/20 * * * *", "2026-03-08T01:30", ["08 01:40 -0500", "08 03:00 -0400"]),
        (NEW_YORK, "30 1 * * *", "2026-10-31T12:00", ["01 01:30 -0400", "02 01:30 -0500"]),
        (NEW_YORK, "30 * * * *", "2026-11-01T01:00", ["01 01:30 -0400", "01 01:30 -0500", "01 02:30 -0500"]),
        # Lord Howe Island changes by half an hour: 4 October 2026 has no 02:00 to 02:30, 5 April has 01:30 twice.
        (LORD_HOWE, "15 2 * * *", "2026-10-03T12:00", ["04 02:30 +1100", "05 02:15 +1100"]),
        (LORD_HOWE, "30 * * * *", "2026-10-04T01:00", ["04 01:30 +1030", "04 02:30 +1100", "04 03:30 +1100"]),
        (LORD_HOWE, "45 1 * * *", "2026-04-04T12:00", ["05 01:45 +1100", "06 01:45 +1030"]),
        (LORD_HOWE, "0 */2 * * *", "2026-04-05T00:00", ["05 02:00 +1030", "05 04:00 +1030"]),
        (LORD_HOWE, "*/15 1 * * *", "2026-04-05T01:20", ["05 01:30 +1100", "05 01:45 +1100", "05 01:30 +1030"]),
        # India has no daylight saving.
        (KOLKATA, "0 2 * * *", "2026-03-28T12:00", ["29 02:00 +0530", "30 02:00 +0530"]),
        (KOLKATA, "0 */2 * * *", "2026-10-25T01:00", ["25 02:00 +0530", "25 04:00 +0530"]),
        # What else cron knows.
        ("UTC", "0 2 * * MON-FRI", "2026-11-20T12:00", ["23 02:00 +0000", "24 02:00 +0000"]),
        ("UTC", "@weekly", "2026-11-18T12:00", ["22 00:00 +0000", "29 00:00 +0000"]),
        ("UTC", "0 0 29 2 *", "2026-01-01T00:00", ["29 00:00 +0000"]),
    ],
)  # fmt: skip
def test_a_due_time_is_where_a_cron_user_expects_it(
    zone: str, cron: str, first: str, expected: list[str]
) -> None:
    assert due_times(cron, zone, first, len(expected)) == expected


def test_a_due_time_asked_for_in_the_second_round_of_a_repeat_lies_after_it() -> None:
    second_round = datetime(2026, 10, 25, 2, 10, tzinfo=ZoneInfo(BERLIN), fold=1)
    assert next_due("30 2 * * *", BERLIN, second_round) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


@given(
    zone=st.sampled_from([BERLIN, NEW_YORK, LORD_HOWE, KOLKATA, "Africa/Casablanca", "America/St_Johns"]),
    minute=st.sampled_from(["*", "*/7", "*/30", "0", "30", "5,50"]),
    hour=st.sampled_from(["*", "*/2", "*/3"]),
    minutes_passed=st.integers(0, 358 * 24 * 60),
)
@settings(max_examples=60, deadline=None)
def test_by_the_clock_means_each_minute_that_the_clock_shows(
    zone: str, minute: str, hour: str, minutes_passed: int
) -> None:
    cron = f"{minute} {hour} * * *"
    start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes_passed)
    fields = CronSim(cron, start)
    clock = [(start + timedelta(minutes=passed)) for passed in range(1, 500)]
    shown = [
        moment
        for moment in clock
        if (local := moment.astimezone(ZoneInfo(zone))).minute in fields.minutes
        and local.hour in fields.hours
    ]
    moment, found = start, []
    while (moment := next_due(cron, zone, moment)) <= clock[-1]:
        found.append(moment)
    assert found == shown


@pytest.mark.parametrize(
    ("cron", "said"),
    [
        ("", "0 fields, not 5"),
        ("0 2 * *", "4 fields, not 5"),
        ("0 0 2 * * *", "6 fields, not 5"),
        ("60 * * * *", "invalid minute"),
        ("0 24 * * *", "invalid hour"),
        ("0 2 0 * *", "invalid day-of-month"),
        ("0 2 * 13 *", "invalid month"),
        ("0 2 * * FUN", "invalid day-of-week"),
        ("*/0 * * * *", "invalid minute"),
        ("0 0 30 2 *", "invalid day-of-month"),
        ("* * */20 * 1L", "does not match any time in the next 50 years"),
        ("9" * 5000 + " * * * *", "more than 200 characters"),
        ("@reboot", "1 fields, not 5"),
        ("0 2 * * \x00", "invalid day-of-week"),
        ("\ud800 2 * * *", "invalid minute"),
    ],
)
def test_an_expression_that_cannot_be_used_is_refused_with_the_field(cron: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        check_cron(cron)


@given(st.text(alphabet="0123456789*/-,#LW ?@MON", max_size=30))
def test_whatever_is_written_is_read_or_refused_in_a_sentence(cron: str) -> None:
    try:
        fields = check_cron(cron).split()
    except InvalidOption:
        return
    assert len(fields) == 5


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Mars/Olympus",
        "../etc/passwd",
        "/etc/passwd",
        "Europe",
        "Europe/Berlin\x00",
        "a" * 500,
        "Ü",
        "\ud800",
    ],
)
def test_a_zone_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match="Unknown time zone"):
        find_timezone(name)


def test_of_missed_due_times_the_newest_is_found() -> None:
    first = datetime(2026, 1, 1, 1, 0, tzinfo=UTC)
    now = datetime(2026, 7, 9, 12, 30, tzinfo=UTC)
    assert newest_due("0 2 * * *", BERLIN, first, now) == datetime(2026, 7, 9, 0, 0, tzinfo=UTC)
    assert newest_due("* * * * *", BERLIN, first, now) == now
    assert newest_due("0 2 1 1 *", BERLIN, first, now) == first


def test_three_missed_years_of_every_minute_are_looked_through_at_once() -> None:
    first = datetime(2023, 1, 1, tzinfo=UTC)
    now = datetime(2026, 7, 9, 12, 30, 30, tzinfo=UTC)
    assert newest_due("* * 5 * *", "UTC", first, now) == datetime(2026, 7, 5, 23, 59, tzinfo=UTC)
