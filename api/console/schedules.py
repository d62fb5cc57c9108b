"""Pages of schedules: when each is due, what its last runs did, why one is late, and actions on runs."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter, Response
from sqlalchemy import Connection

from api.console.console import Console, Page, find_action
from api.dependencies import Resources, ResourcesDependency
from api.routes.runs import RunId
from api.routes.schedules import ScheduleName
from api.serving import cut_page, decode_cursor
from vectormill.domain.errors import InvalidOption
from vectormill.runs.run import HELD, QUEUED, RUNNING, Run, describe_counts
from vectormill.runs.runs import cancel_run, confirm_run, list_runs
from vectormill.schedules.schedule import OVERDUE_SECONDS, Schedule, ScheduleCounts, find_timezone
from vectormill.schedules.schedules import (
    count_schedules,
    find_schedule,
    list_schedules,
    pause_schedule,
    resume_schedule,
    run_schedule_now,
)
from vectormill.workers.workers import INDEXER, SCHEDULER, list_signs_of_life

router = APIRouter(include_in_schema=False)

PAGE_SIZE: Final = 100
HISTORY_SIZE: Final = 50
RUN_ACTIONS: Final[dict[str, Callable[[Connection, Any], object]]] = {
    "confirm": confirm_run,
    "cancel": cancel_run,
}


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """A problem of a schedule. `is_bad` marks one that needs somebody's action."""

    text: str
    is_bad: bool


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule in a list. `next_due` is in the schedule's time zone; None if no run is due."""

    schedule: Schedule
    standing: str
    next_due: str | None
    troubles: list[ScheduleProblem]


@dataclass(frozen=True, slots=True)
class SchedulesView:
    """One page of the list of schedules; `next` is the cursor of the next page, None on the last."""

    lines: list[ListedSchedule]
    counts: ScheduleCounts
    next: str | None
    is_scheduler_alive: bool
    is_indexer_alive: bool


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A run of a schedule, its changes as text, and its duration.

    `seconds` is the time from its claim by an indexer until its end or now; None before the claim.
    """

    run: Run
    changes: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """A schedule with its newest runs."""

    line: ListedSchedule
    history: list[HistoryRow]


def read_schedules(connection: Connection, console: Console, after: str | None = None) -> SchedulesView:
    found = list_schedules(connection, after=decode_cursor(after), limit=PAGE_SIZE + 1)
    page, following = cut_page(found, PAGE_SIZE, lambda schedule: schedule.id)
    signs = list_signs_of_life(connection)
    return SchedulesView(
        lines=[describe_schedule(schedule, signs) for schedule in page],
        counts=count_schedules(connection),
        next=following,
        is_scheduler_alive=SCHEDULER in signs,
        is_indexer_alive=INDEXER in signs,
    )


def read_schedule(connection: Connection, console: Console, name: ScheduleName) -> ScheduleView:
    """Return a schedule with its newest runs. Raise ScheduleNotFound."""
    schedule = find_schedule(connection, name)
    history = []
    for run in list_runs(connection, schedule_id=schedule.id, limit=HISTORY_SIZE):
        end, began = run.finished_at or schedule.now, run.started_at
        seconds = None if began is None else (end - began).total_seconds()
        history.append(HistoryRow(run, describe_counts(asdict(run.counts)), seconds))
    return ScheduleView(describe_schedule(schedule, list_signs_of_life(connection)), history)


def in_transaction(act: Callable[[Connection, str], object]) -> Callable[[Resources, Any], None]:
    """Return a page action that calls `act` on a schedule in a separate transaction."""

    def carry_out(resources: Resources, name: str) -> None:
        with resources.engine.begin() as connection:
            act(connection, name)

    return carry_out


PAGES: Final = (
    Page(
        path="/console/schedules",
        title="Schedules",
        lead="When collections are re-indexed from their sources, and how the last runs ended.",
        template="schedules.html",
        read=read_schedules,
    ),
    Page(
        path="/console/schedules/{name}",
        title="Schedule {name}",
        template="schedule.html",
        read=read_schedule,
        actions={
            "pause": in_transaction(pause_schedule),
            "resume": in_transaction(resume_schedule),
            "run": in_transaction(run_schedule_now),
        },
    ),
)


@router.post("/console/runs/{run_id}/{action}", status_code=204)
def post_run_action(resources: ResourcesDependency, run_id: RunId, action: str) -> Response:
    """Carry out an action on a run; the page shows the result by its live stream.

    Raise RunNotFound, WrongRunState, or Problem for an unknown action.
    """
    act = find_action(RUN_ACTIONS, action)
    with resources.engine.begin() as connection:
        act(connection, run_id)
    return Response(status_code=204)


def describe_schedule(schedule: Schedule, signs: Collection[str]) -> ListedSchedule:
    """Return a schedule for a list.

    `signs` has the duties, such as scheduler and indexer, with a recent heartbeat.
    """
    troubles = list(list_troubles(schedule, signs))
    if schedule.paused_at is not None:
        standing = "paused"
    elif any(trouble.is_bad for trouble in troubles):
        standing = "failed" if schedule.num_failures else "late"
    else:
        standing = "on_time"
    return ListedSchedule(schedule, standing, describe_next(schedule), troubles)


def list_troubles(schedule: Schedule, signs: Collection[str]) -> Iterator[ScheduleProblem]:
    """Yield why a schedule is late or its collection out of step.

    `signs` has the duties, such as scheduler and indexer, with a recent heartbeat.
    """
    has_indexer = INDEXER in signs
    if schedule.lag_seconds > OVERDUE_SECONDS:
        why = (
            "the scheduler is running but did not start one; see its log"
            if SCHEDULER in signs
            else "no scheduler is running; start `vectormill scheduler`"
        )
        yield ScheduleProblem(
            f"Due since {format_minute(schedule.next_due_at)}, but no run was started: {why}.", True
        )
    if schedule.last_state == QUEUED:
        why = (
            "an indexer starts it once no other run is working on the collection"
            if has_indexer
            else "no indexer is running; start `vectormill indexer`"
        )
        yield ScheduleProblem(
            f"Its run of {format_minute(schedule.last_run_at)} is waiting: {why}.", not has_indexer
        )
    if schedule.last_state == HELD:
        yield ScheduleProblem(
            f"Its run of {format_minute(schedule.last_run_at)} is held because it would change more "
            "than is allowed without confirmation; confirm or cancel it.",
            True,
        )
    if schedule.last_state == RUNNING and not has_indexer:
        yield ScheduleProblem("Its run is in progress, but no indexer is running.", True)
    if schedule.num_failures:
        times = "once" if schedule.num_failures == 1 else f"{schedule.num_failures:,} times"
        yield ScheduleProblem(
            f"Failed {times} since its last success.{describe_error(schedule.last_error)}", True
        )
    elif schedule.num_skipped:
        times = "one due time" if schedule.num_skipped == 1 else f"{schedule.num_skipped:,} due times"
        yield ScheduleProblem(
            f"Skipped {times} since its last success.{describe_error(schedule.last_error)}", False
        )
    if schedule.paused_at is not None:
        yield ScheduleProblem(
            f"Paused since {format_minute(schedule.paused_at)}: due times pass without a run.", False
        )


def describe_next(schedule: Schedule) -> str | None:
    if schedule.paused_at is not None or schedule.next_due_at is None:
        return None
    try:
        local = schedule.next_due_at.astimezone(find_timezone(schedule.timezone))
    except InvalidOption:  # this machine's tz database lacks the zone
        return format_minute(schedule.next_due_at)
    return f"{local:%Y-%m-%d %H:%M} {schedule.timezone}"


def format_minute(moment: datetime | None) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if moment else "an unknown time"


def describe_error(error: str | None) -> str:
    return f" {error.rstrip('.')}." if error else ""
