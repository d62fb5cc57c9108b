"""Schedules for a page: how each stands, and why one is late. Pure: facts go in, sentences come out."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from vectormill.domain.errors import InvalidOption
from vectormill.runs.run import HELD, QUEUED, RUNNING
from vectormill.schedules.cron import find_timezone
from vectormill.schedules.schedule import Schedule, ScheduledRun

# A due time is dealt with within two seconds; after so many nobody looks at it.
OVERDUE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem of a schedule. `is_bad` marks one that somebody has to act on."""

    text: str
    is_bad: bool


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule in a list. `next_due` is on the clock of its zone; None while it is paused."""

    schedule: Schedule
    standing: str
    next_due: str | None
    troubles: list[Trouble]


def describe_schedule(
    schedule: Schedule, *, is_scheduler_alive: bool, is_indexer_alive: bool
) -> ListedSchedule:
    troubles = list_troubles(
        schedule, is_scheduler_alive=is_scheduler_alive, is_indexer_alive=is_indexer_alive
    )
    if schedule.paused_at is not None:
        standing = "paused"
    elif any(trouble.is_bad for trouble in troubles):
        standing = "failed" if schedule.num_failures else "late"
    else:
        standing = "on_time"
    return ListedSchedule(schedule, standing, _tell_next(schedule), troubles)


def list_troubles(schedule: Schedule, *, is_scheduler_alive: bool, is_indexer_alive: bool) -> list[Trouble]:
    """List why a schedule is late or its collection out of step; whatever needs attention comes first."""
    found: list[Trouble] = []
    if schedule.lag_seconds > OVERDUE_SECONDS:
        why = (
            "the scheduler is alive but has not come to it; its log says why"
            if is_scheduler_alive
            else "no scheduler gives a sign of life; start `vectormill scheduler`"
        )
        found.append(Trouble(f"Due since {_minute(schedule.next_due_at)}, and no run was made: {why}.", True))
    if schedule.last_state == QUEUED:
        why = (
            "an indexer takes it when nothing else works on the collection"
            if is_indexer_alive
            else "no indexer gives a sign of life; start `vectormill indexer`"
        )
        found.append(
            Trouble(f"Its run of {_minute(schedule.last_run_at)} waits: {why}.", not is_indexer_alive)
        )
    if schedule.last_state == HELD:
        found.append(
            Trouble(
                f"Its run of {_minute(schedule.last_run_at)} is held, for it would change more than is allowed "
                "unasked; confirm or cancel it.",
                True,
            )
        )
    if schedule.last_state == RUNNING and not is_indexer_alive:
        found.append(Trouble("Its run is going on, but no indexer gives a sign of life.", True))
    if schedule.num_failures:
        times = "once" if schedule.num_failures == 1 else f"{schedule.num_failures:,} times"
        found.append(Trouble(f"Failed {times} since its last success.{_say(schedule.last_error)}", True))
    elif schedule.num_skipped:
        times = "one due time" if schedule.num_skipped == 1 else f"{schedule.num_skipped:,} due times"
        found.append(Trouble(f"Skipped {times} since its last success.{_say(schedule.last_error)}", False))
    if schedule.paused_at is not None:
        found.append(Trouble(f"Paused since {_minute(schedule.paused_at)}: due times pass.", False))
    return found


def count_changes(run: ScheduledRun) -> str:
    """`1,200 seen, 3 new, 1 failed`, without what a run found as it was; empty of one that read nothing."""
    names = (
        ("seen", run.counts.num_seen),
        ("new", run.counts.num_new),
        ("changed", run.counts.num_changed),
        ("metadata only", run.counts.num_metadata_only),
        ("moved", run.counts.num_moved),
        ("deleted", run.counts.num_deleted),
        ("failed", run.counts.num_failed),
    )
    return ", ".join(f"{number:,} {word}" for word, number in names if number)


def measure_run(run: ScheduledRun, now: datetime) -> float | None:
    """Return seconds since an indexer took it, until its end or now; None of one that nobody took."""
    return None if run.started_at is None else ((run.finished_at or now) - run.started_at).total_seconds()


def _tell_next(schedule: Schedule) -> str | None:
    if schedule.paused_at is not None or schedule.next_due_at is None:
        return None
    try:
        local = schedule.next_due_at.astimezone(find_timezone(schedule.timezone))
    except InvalidOption:  # the tz database of this machine does not have it
        return _minute(schedule.next_due_at)
    return f"{local:%Y-%m-%d %H:%M} {schedule.timezone}"


def _minute(moment: datetime | None) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if moment else "an unknown moment"


def _say(error: str | None) -> str:
    return f" {error.rstrip('.')}." if error else ""
