"""Schedules in words, from the API's own answers. Prints nothing."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from vectormill.cli.views.summary import Fact

# A due time is dealt with within two seconds; after so many nobody looks at it.
OVERDUE_SECONDS: Final = 60.0

Body = Mapping[str, Any]


def describe_schedule(schedule: Body) -> list[Fact]:
    """Return one line for each fact about a schedule, the most asked-for first."""
    lines = [
        Fact("name", schedule["name"]),
        Fact("collection", schedule["collection"]),
        Fact("cron", f"{schedule['cron']} ({schedule['timezone']})"),
        Fact("overlap", schedule["overlap"]),
        Fact("next due", describe_due(schedule)),
        Fact("last run", schedule["last_state"] or "none yet"),
        Fact("last success", describe_success(schedule)),
        Fact("consecutive failures", str(schedule["consecutive_failures"])),
    ]
    if schedule["skipped_since_success"]:
        lines.append(Fact("skipped since", str(schedule["skipped_since_success"])))
    if schedule["last_error"]:
        lines.append(Fact("last error", schedule["last_error"]))
    return lines


def describe_due(schedule: Body) -> str:
    """Format when the schedule is next due, on the clock of its zone and in UTC."""
    if schedule["paused_at"] is not None:
        return f"paused since {_minute(schedule['paused_at'])} UTC"
    due_at = _minute(schedule["next_due_at"])
    local = schedule["next_due_local"]
    if local is None or schedule["timezone"] == "UTC":
        return f"{due_at} UTC"
    # The day in UTC is said where it is another one.
    in_utc = due_at if due_at[:10] != local[:10] else due_at[11:]
    return f"{_minute(local)} {schedule['timezone']} ({in_utc} UTC)"


def describe_success(schedule: Body) -> str:
    return f"{_minute(schedule['last_success_at'])} UTC" if schedule["last_success_at"] else "never"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Format what a run changed, without the rows that it found unchanged."""
    names = {
        "num_seen": "seen",
        "num_new": "new",
        "num_changed": "changed",
        "num_metadata_only": "metadata only",
        "num_moved": "moved",
        "num_deleted": "deleted",
        "num_failed": "failed",
    }
    return ", ".join(f"{counts[name]:,} {word}" for name, word in names.items() if counts.get(name))


def describe_standing(schedule: Body) -> str:
    """Describe how the schedule stands in one sentence; whatever needs attention comes first."""
    name, problems = schedule["name"], []
    if schedule["lag_seconds"] > OVERDUE_SECONDS:
        problems.append(
            f"due since {schedule['lag_seconds']:,.0f} s and nobody looks: is a scheduler running?"
        )
    if schedule["consecutive_failures"]:
        times = (
            "once" if schedule["consecutive_failures"] == 1 else f"{schedule['consecutive_failures']} times"
        )
        problems.append(f"failed {times} since its last success ({describe_success(schedule)})")
    if schedule["skipped_since_success"]:
        problems.append(f"skipped {schedule['skipped_since_success']} due times since its last success")
    if problems and schedule["last_error"]:
        problems.append(str(schedule["last_error"]).rstrip("."))
    said = "; ".join(problems) or f"last success {describe_success(schedule)}"
    return f"Schedule {name} of {schedule['collection']}: {said}; next due {describe_due(schedule)}."


def _minute(moment: str) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M")
