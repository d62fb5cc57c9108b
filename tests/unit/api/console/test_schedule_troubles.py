"""Why a schedule is late, from facts alone."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from api.console.facts.schedules import describe_schedule
from vectormill.schedules.schedule import Schedule

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
SCHEDULE = Schedule(
    id=1, name="nightly", collection="docs", cron="0 2 * * *", timezone="UTC", overlap="skip", options={},
    next_due_at=NOW + timedelta(hours=14), paused_at=None, created_at=NOW, updated_at=NOW, last_state="completed",
    last_run_at=NOW, last_success_at=NOW, num_failures=0, num_skipped=0, last_error=None, now=NOW,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "standing", "said"),
    [
        ({}, "on_time", []),
        ({"next_due_at": NOW - timedelta(seconds=30)}, "on_time", []),  # dealt with in a moment
        (
            {"next_due_at": NOW - timedelta(hours=1)},
            "late",
            ["Due since 2026-11-23 11:00 UTC, and no run was made"],
        ),
        ({"last_state": "held"}, "late", ["is held"]),
        (
            {"num_failures": 3, "last_error": "No route."},
            "failed",
            ["Failed 3 times since its last success. No route."],
        ),
        (
            {"num_skipped": 1, "last_error": "Busy"},
            "on_time",
            ["Skipped one due time since its last success. Busy."],
        ),
        ({"num_failures": 1, "num_skipped": 2}, "failed", ["Failed once"]),
        (
            {"paused_at": NOW, "num_failures": 1},
            "paused",
            ["Failed once", "Paused since 2026-11-23 12:00 UTC"],
        ),
    ],
)
def test_what_is_wrong_is_said_and_what_must_be_done_comes_first(
    changes: dict[str, object], standing: str, said: list[str]
) -> None:
    line = describe_schedule(
        replace(SCHEDULE, **changes),  # type: ignore[arg-type]  # of several fields
        is_scheduler_alive=True,
        is_indexer_alive=True,
    )
    assert line.standing == standing
    assert len(line.troubles) == len(said)
    for trouble, part in zip(line.troubles, said, strict=True):
        assert part in trouble.text


def test_a_run_that_no_indexer_takes_makes_a_schedule_late() -> None:
    queued = replace(SCHEDULE, last_state="queued")
    for is_alive, standing in ((True, "on_time"), (False, "late")):
        line = describe_schedule(queued, is_scheduler_alive=True, is_indexer_alive=is_alive)
        assert line.standing == standing


def test_a_zone_that_this_machine_does_not_know_is_told_in_utc() -> None:
    line = describe_schedule(
        replace(SCHEDULE, timezone="Moon/Base"), is_scheduler_alive=True, is_indexer_alive=True
    )
    assert line.next_due == "2026-11-24 02:00 UTC"
