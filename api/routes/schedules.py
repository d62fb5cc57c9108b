"""Schedules over HTTP: created, shown, changed, paused, resumed, triggered and deleted; their history."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path
from sqlalchemy import Connection

from api.dependencies import parse_collection_name
from api.intake.requests import IdempotencyKey
from api.serving import cut_page, decode_cursor, serve
from vectormill.db.idempotency import make_once
from vectormill.domain.errors import ScheduleNotFound
from vectormill.operation import PageQuery
from vectormill.runs.runs import find_run, list_runs, position_of
from vectormill.schedules import operations
from vectormill.schedules.operations import (
    ScheduleBody,
    ScheduleChange,
    ScheduledRunBody,
    ScheduledRunPage,
    SchedulePage,
    ScheduleRequest,
    describe_schedule,
    describe_scheduled_run,
)
from vectormill.schedules.schedule import SCHEDULE_NAME, NewSchedule
from vectormill.schedules.schedules import (
    change_schedule,
    create_schedule,
    delete_schedule,
    find_schedule,
    list_schedules,
    pause_schedule,
    resume_schedule,
    run_schedule_now,
)

router = APIRouter(tags=["schedules"])


def parse_schedule_name(name: Annotated[str, Path(description="The schedule's name.")]) -> str:
    """Return the name. Raise ScheduleNotFound if no schedule can have it."""
    if not SCHEDULE_NAME.fullmatch(name):
        raise ScheduleNotFound
    return name


ScheduleName = Annotated[str, Depends(parse_schedule_name)]


@serve(router, operations.CREATE)
def post_schedule(body: ScheduleRequest, connection: Connection) -> ScheduleBody:
    """Create a schedule that re-indexes a collection from its source at every due time from now on."""
    collection = parse_collection_name(body.collection)
    new = NewSchedule(body.name or collection, collection, body.cron, body.timezone, body.overlap)
    return describe_schedule(create_schedule(connection, new))


@serve(router, operations.LIST)
def get_schedules(connection: Connection, query: PageQuery) -> SchedulePage:
    """List all schedules, oldest first."""
    found = list_schedules(connection, after=decode_cursor(query.after), limit=query.limit + 1)
    page, cursor = cut_page(found, query.limit, lambda schedule: schedule.id)
    return SchedulePage(data=[describe_schedule(schedule) for schedule in page], next=cursor)


@serve(router, operations.SHOW)
def get_schedule(connection: Connection, name: ScheduleName) -> ScheduleBody:
    """Show a schedule: when it is next due, and how its runs ended."""
    return describe_schedule(find_schedule(connection, name))


@serve(router, operations.CHANGE)
def patch_schedule(connection: Connection, name: ScheduleName, body: ScheduleChange) -> ScheduleBody:
    """Change when a schedule is due, or what happens when runs overlap.

    After a change of the expression or the time zone, the schedule is due from now on.
    """
    changed = change_schedule(connection, name, cron=body.cron, timezone=body.timezone, overlap=body.overlap)
    return describe_schedule(changed)


@serve(router, operations.DELETE)
def remove_schedule(connection: Connection, name: ScheduleName) -> None:
    """Delete a schedule. Its runs stay, and a run in progress continues."""
    delete_schedule(connection, name)


@serve(router, operations.PAUSE)
def post_pause(connection: Connection, name: ScheduleName) -> ScheduleBody:
    """Pause a schedule: due times pass without a run until it is resumed. A run in progress continues."""
    return describe_schedule(pause_schedule(connection, name))


@serve(router, operations.RESUME)
def post_resume(connection: Connection, name: ScheduleName) -> ScheduleBody:
    """Resume a paused schedule. Due times that passed during the pause are not made up for."""
    return describe_schedule(resume_schedule(connection, name))


@serve(router, operations.RUN)
def post_run(connection: Connection, name: ScheduleName, idempotency_key: IdempotencyKey) -> ScheduledRunBody:
    """Start a run now, in addition to the due times; it waits while another run of the collection is in progress."""

    def make() -> str:
        return str(run_schedule_now(connection, name))

    made = make_once(connection, "run of a schedule", idempotency_key, name.encode(), make)
    return describe_scheduled_run(find_run(connection, UUID(made)))


@serve(router, operations.HISTORY)
def get_history(connection: Connection, name: ScheduleName, query: PageQuery) -> ScheduledRunPage:
    """List the due times of a schedule, newest first: runs, and skipped due times with the reason."""
    schedule_id = find_schedule(connection, name).id
    before = decode_cursor(query.after)
    found = list_runs(connection, schedule_id=schedule_id, before=before, limit=query.limit + 1)
    page, cursor = cut_page(found, query.limit, position_of)
    return ScheduledRunPage(data=[describe_scheduled_run(run) for run in page], next=cursor)
