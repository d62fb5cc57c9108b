"""Numbers, times and sentences as the console tells them, and why a schedule is late."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from api.console import formats
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


def test_a_command_in_a_sentence_is_set_as_one_and_nothing_in_it_is_markup() -> None:
    assert formats.mark_code("run `a <b>` & go") == "run <code>a &lt;b&gt;</code> &amp; go"
    assert formats.mark_code("<script>") == "&lt;script&gt;"


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
