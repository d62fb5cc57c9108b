"""Numbers, times and sentences as the console tells them, and why a schedule is late."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from api.console import words
from api.console.schedules import describe_schedule
from vectormill.schedules.schedule import Schedule
from vectormill.workers.workers import INDEXER, SCHEDULER

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
SCHEDULE = Schedule(
    id=1, name="nightly", collection="docs", cron="0 2 * * *", timezone="UTC", overlap="skip", options={},
    next_due_at=NOW + timedelta(hours=14), paused_at=None, created_at=NOW, updated_at=NOW, last_state="completed",
    last_run_at=NOW, last_success_at=NOW, num_failures=0, num_skipped=0, last_error=None, now=NOW,
)  # fmt: skip
ALIVE = {SCHEDULER, INDEXER}


def test_numbers_and_times_are_told_with_as_many_digits_as_matter() -> None:
    for seconds, told in (
        (None, "–"), (0, "0 s"), (0.25, "0.2 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"),
        (3600, "1 h 00 min"), (90_061, "1 d 1 h"),
    ):  # fmt: skip
        assert words.tell_duration(seconds) == told
    for share, told in (
        (None, "–"), (0, "0 %"), (0.004, "0.4 %"), (0.42, "42 %"), (0.9999, "99 %"), (1, "100 %"),
    ):  # fmt: skip
        assert words.tell_share(share) == told
    for ago, told in (
        (0, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (7300, "2 h ago"), (90_000, "1 d ago"),
    ):  # fmt: skip
        assert words.tell_ago(NOW - timedelta(seconds=ago), NOW) == told
    for size, told in (
        (0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (230 << 20, "230 MiB"), (4.2 * (1 << 30), "4.2 GiB"),
        (3 << 40, "3.0 TiB"),
    ):  # fmt: skip
        assert words.tell_bytes(size) == told
    assert words.tell_count(12345) == "12,345"
    assert (words.tell_rate(0), words.tell_rate(0.254), words.tell_rate(1234.5)) == ("–", "0.25", "1,234")
    assert words.format_moment(NOW) == "2026-11-23 12:00:00 UTC"
    assert words.tell_about(3721) == "4,000"
    assert words.tell_query({"state": "failed", "after": None}) == "state=failed"
    assert len(words.tell_excerpt("x" * 1000)) == words.MOST_SHOWN_CHARS


def test_a_command_in_a_sentence_is_set_as_one_and_nothing_in_it_is_markup() -> None:
    assert words.tell_sentence("run `a <b>` & go") == "run <code>a &lt;b&gt;</code> &amp; go"
    assert words.tell_sentence("<script>") == "&lt;script&gt;"


def test_what_is_wrong_with_a_schedule_is_said_and_what_must_be_done_comes_first() -> None:
    cases: tuple[tuple[dict[str, object], set[str], str, list[str]], ...] = (
        ({}, ALIVE, "on_time", []),
        ({"next_due_at": NOW - timedelta(seconds=30)}, ALIVE, "on_time", []),  # within the scheduler's time
        (
            {"next_due_at": NOW - timedelta(hours=1)},
            ALIVE,
            "late",
            ["Due since 2026-11-23 11:00 UTC, but no run was started"],
        ),
        ({"last_state": "held"}, ALIVE, "late", ["is held"]),
        ({"last_state": "queued"}, ALIVE, "on_time", ["is waiting: an indexer starts it"]),
        ({"last_state": "queued"}, {SCHEDULER}, "late", ["is waiting: no indexer"]),
        (
            {"num_failures": 3, "last_error": "No route."},
            ALIVE,
            "failed",
            ["Failed 3 times since its last success."],
        ),
        (
            {"num_skipped": 1, "last_error": "Busy"},
            ALIVE,
            "on_time",
            ["Skipped one due time since its last success."],
        ),
        ({"num_failures": 1, "num_skipped": 2}, ALIVE, "failed", ["Failed once"]),
        (
            {"paused_at": NOW, "num_failures": 1},
            ALIVE,
            "paused",
            ["Failed once", "Paused since 2026-11-23 12:00 UTC"],
        ),
    )
    for changes, signs, standing, said in cases:
        line = describe_schedule(replace(SCHEDULE, **changes), signs)  # type: ignore[arg-type]  # of several fields
        assert line.standing == standing, changes
        assert len(line.troubles) == len(said)
        for trouble, part in zip(line.troubles, said, strict=True):
            assert part in trouble.text
    unknown_zone = describe_schedule(replace(SCHEDULE, timezone="Moon/Base"), ALIVE)
    assert unknown_zone.next_due == "2026-11-24 02:00 UTC"
