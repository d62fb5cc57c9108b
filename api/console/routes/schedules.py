"""The console's schedules: when each is due next, what its last runs came to, and why one is late."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from api.console.console import Console, ConsoleDependency, VisitorDependency
from api.console.facts.schedules import ListedSchedule, count_changes, describe_schedule, measure_run
from api.console.live import LiveStream, Rendered
from api.cursors import After, decode_cursor, encode_cursor
from api.dependencies import Resources, ResourcesDependency
from api.routes.schedules import ScheduleName
from vectormill.domain.errors import ScheduleNotFound
from vectormill.schedules.due_times import run_schedule_now
from vectormill.schedules.schedule import Schedule, ScheduleCounts, ScheduledRun
from vectormill.schedules.schedules import (
    count_schedules,
    find_schedule,
    list_scheduled_runs,
    list_schedules,
    pause_schedule,
    resume_schedule,
)
from vectormill.workers.workers import INDEXER, SCHEDULER, list_signs_of_life

router = APIRouter(include_in_schema=False)

PAGE_SIZE: Final = 100
HISTORY_SIZE: Final = 50

ACTIONS: Final[dict[str, Callable[[Connection, str], Any]]] = {
    "pause": pause_schedule,
    "resume": resume_schedule,
    "run": run_schedule_now,
}


@dataclass(frozen=True, slots=True)
class SchedulesView:
    """A page of them; `next` is the cursor of the page after it."""

    lines: list[ListedSchedule]
    counts: ScheduleCounts
    next: str | None
    is_scheduler_alive: bool
    is_indexer_alive: bool


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """A run of the schedule: what it did, and for how long."""

    run: ScheduledRun
    changes: str
    seconds: float | None


def describe(connection: Connection, schedules: list[Schedule]) -> list[ListedSchedule]:
    signs = list_signs_of_life(connection)
    return [
        describe_schedule(each, is_scheduler_alive=SCHEDULER in signs, is_indexer_alive=INDEXER in signs)
        for each in schedules
    ]


def render_list(resources: Resources, console: Console, after: str | None, *, can_write: bool) -> Rendered:
    with resources.engine.connect() as connection:
        found = list_schedules(connection, after=decode_cursor(after), limit=PAGE_SIZE + 1)
        page = list(found[:PAGE_SIZE])
        signs = list_signs_of_life(connection)
        view = SchedulesView(
            lines=describe(connection, page),
            counts=count_schedules(connection),
            next=encode_cursor(page[-1].id) if len(found) > len(page) else None,
            is_scheduler_alive=SCHEDULER in signs,
            is_indexer_alive=INDEXER in signs,
        )
    return Rendered(console.render("schedules/list.html", None, view=view, can_write=can_write))


def render_one(resources: Resources, console: Console, name: str, *, can_write: bool) -> Rendered:
    """Render a schedule; one that was deleted meanwhile is shown as gone."""
    try:
        with resources.engine.connect() as connection:
            schedule = find_schedule(connection, name)
            (line,) = describe(connection, [schedule])
            runs = list_scheduled_runs(connection, name, limit=HISTORY_SIZE)
    except ScheduleNotFound:
        return Rendered(console.render("schedules/gone.html", None, schedule=name), is_last=True)
    history = [HistoryRow(run, count_changes(run), measure_run(run, schedule.now)) for run in runs]
    html = console.render("schedules/one.html", None, line=line, history=history, can_write=can_write)
    return Rendered(html)


@router.get("/console/schedules")
async def get_schedules(
    request: Request,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
    after: After = None,
) -> HTMLResponse:
    part = await run_in_threadpool(render_list, resources, console, after, can_write=visitor.can_write)
    return console.page(request, "schedules/page.html", part=part.html, after=after)


@router.get("/console/live/schedules")
async def get_live_schedules(
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
    after: After = None,
) -> LiveStream:
    can_write = visitor.can_write
    return LiveStream(
        resources,
        console.views,
        f"schedules {after} {can_write}",
        lambda: render_list(resources, console, after, can_write=can_write),
    )


@router.get("/console/schedules/{name}")
async def get_schedule(
    request: Request,
    name: ScheduleName,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
) -> HTMLResponse:
    part = await run_in_threadpool(render_one, resources, console, name, can_write=visitor.can_write)
    if part.is_last:
        raise ScheduleNotFound(f"There is no schedule {name!r}.")
    return console.page(request, "schedules/detail.html", schedule=name, part=part.html)


@router.get("/console/live/schedules/{name}")
async def get_live_schedule(
    name: ScheduleName,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
) -> LiveStream:
    can_write = visitor.can_write
    return LiveStream(
        resources,
        console.views,
        f"schedule {name} {can_write}",
        lambda: render_one(resources, console, name, can_write=can_write),
    )


@router.post("/console/schedules/{name}/{action}")
async def post_action(
    name: ScheduleName,
    action: str,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
) -> HTMLResponse:
    """Pause it, resumes it, or make a run now; answers how it stands then."""
    act = ACTIONS.get(action)
    if act is None:
        raise ScheduleNotFound(f"{action[:40]!r} is not an action on a schedule.")

    def press() -> Rendered:
        with resources.engine.begin() as connection:
            act(connection, name)
        return render_one(resources, console, name, can_write=visitor.can_write)

    return HTMLResponse((await run_in_threadpool(press)).html)
