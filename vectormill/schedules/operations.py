"""Operations on schedules, with the bodies of these and of the runs in their history."""

from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Final, TypedDict

from msgspec import Meta, Struct

from vectormill.domain.errors import InvalidOption
from vectormill.keys.api_key import READ, WRITE
from vectormill.moments import Moment, format_moment
from vectormill.operation import (
    NO_CONTENT,
    Identifier,
    NextCursor,
    Nothing,
    Operation,
    PageQuery,
    describe,
    one_of,
)
from vectormill.runs.run import RUN_PHASES, RUN_STATES, Run
from vectormill.schedules.schedule import (
    MAX_CRON_CHARS,
    MAX_TIMEZONE_CHARS,
    OVERLAPS,
    SCHEDULE_NAME,
    SKIP,
    Overlap,
    Schedule,
    find_timezone,
)

Cron = Annotated[
    str,
    Meta(
        max_length=MAX_CRON_CHARS,
        description="Minute, hour, day of the month, month, day of the week, as in a crontab; or @hourly, @daily, "
        "@weekly, @monthly, @yearly.",
    ),
]
Timezone = Annotated[
    str,
    Meta(
        max_length=MAX_TIMEZONE_CHARS,
        description="The tz database name of the time zone that the expression refers to.",
    ),
]
OverlapChoice = Annotated[
    Overlap,
    Meta(
        description="What happens at a due time while a run of the collection is active: it is skipped, or it waits.",
        extra_json_schema={"type": "string", "enum": list(OVERLAPS)},
    ),
]
RunState = Annotated[str, one_of(RUN_STATES)]


class ScheduleRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A new schedule. Its name defaults to that of its collection."""

    collection: Annotated[str, Meta(max_length=63)]
    cron: Cron
    timezone: Timezone = "UTC"
    overlap: OverlapChoice = SKIP
    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{SCHEDULE_NAME.pattern}$"})] | None = None


class ScheduleChange(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A change of a schedule; fields that are left out stay as they are."""

    cron: Cron | None = None
    timezone: Timezone | None = None
    overlap: OverlapChoice | None = None


class ScheduleBody(TypedDict):
    """A schedule, in the same shape wherever the API returns it."""

    name: str
    collection: str
    cron: str
    timezone: str
    overlap: Annotated[str, one_of(OVERLAPS)]
    next_due_at: Annotated[Moment | None, Meta(description="In UTC; null while it is paused.")]
    next_due_local: Annotated[
        str | None, Meta(description="The same moment in the schedule's time zone, with the offset.")
    ]
    lag_seconds: Annotated[
        float, Meta(description="How long a due time has been waiting for a scheduler; 0 if none is.")
    ]
    paused_at: Annotated[Moment | None, Meta(description="Null unless it is paused.")]
    last_state: Annotated[RunState | None, Meta(description="The state of its newest run.")]
    last_run_at: Annotated[Moment | None, Meta(description="When its newest run was created.")]
    last_success_at: Annotated[Moment | None, Meta(description="When a run last succeeded.")]
    consecutive_failures: Annotated[int, Meta(description="Runs that failed since the last success.")]
    skipped_since_success: Annotated[
        int, Meta(description="Due times that were skipped since then because of an overlap.")
    ]
    last_error: Annotated[str | None, Meta(description="Why the newest of these failed or was skipped.")]
    created_at: Moment
    updated_at: Moment


class SchedulePage(TypedDict):
    data: list[ScheduleBody]
    next: NextCursor


class ScheduledRunBody(TypedDict):
    """A run in a schedule's history. GET /v1/runs/{id} shows the full run."""

    id: Identifier
    state: RunState
    phase: Annotated[str, one_of(RUN_PHASES)] | None
    due_at: Annotated[Moment | None, Meta(description="Null if a client started the run.")]
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    counts: Annotated[dict[str, int], Meta(description="Rows of the source by outcome.")]
    error: Annotated[str | None, Meta(description="Why it failed or was skipped.")]


class ScheduledRunPage(TypedDict):
    data: list[ScheduledRunBody]
    next: NextCursor


def describe_schedule(schedule: Schedule) -> ScheduleBody:
    """Return the response body of a schedule."""
    due_at = None if schedule.paused_at is not None else schedule.next_due_at
    local = None
    if due_at is not None:
        with suppress(InvalidOption):  # this machine may not know the zone
            local = due_at.astimezone(find_timezone(schedule.timezone)).isoformat()
    return describe(
        ScheduleBody,
        schedule,
        next_due_at=format_moment(due_at),
        next_due_local=local,
        consecutive_failures=schedule.num_failures,
        skipped_since_success=schedule.num_skipped,
    )


def describe_scheduled_run(run: Run) -> ScheduledRunBody:
    """Return the response body of a run in a schedule's history."""
    return describe(ScheduledRunBody, run, counts=asdict(run.counts))


ALL: Final = "/v1/schedules"
ONE: Final = "/v1/schedules/{name}"

# Creating a schedule is not retried, because the second attempt would conflict with the result of the first.
CREATE: Final = Operation(
    "POST", ALL, WRITE, ScheduleBody, ScheduleRequest, status=201, location=ONE, is_repeatable=False,
    example={"collection": "docs", "cron": "0 2 * * *", "timezone": "Europe/Berlin", "overlap": "skip"},
)  # fmt: skip
LIST: Final = Operation("GET", ALL, READ, SchedulePage, query=PageQuery)
SHOW: Final = Operation("GET", ONE, READ, ScheduleBody)
CHANGE: Final = Operation("PATCH", ONE, WRITE, ScheduleBody, ScheduleChange, example={"cron": "30 4 * * *"})
DELETE: Final = Operation("DELETE", ONE, WRITE, Nothing, status=NO_CONTENT)
PAUSE: Final = Operation("POST", ONE + "/pause", WRITE, ScheduleBody)
RESUME: Final = Operation("POST", ONE + "/resume", WRITE, ScheduleBody)
RUN: Final = Operation("POST", ONE + "/run", WRITE, ScheduledRunBody, status=202)
HISTORY: Final = Operation("GET", ONE + "/runs", READ, ScheduledRunPage, query=PageQuery)
