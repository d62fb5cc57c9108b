"""Schedules as the API takes and answers them, and the runs of their history."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from vectormill.domain.errors import InvalidOption
from vectormill.moments import in_utc
from vectormill.runs.run import RUN_PHASES, RUN_STATES
from vectormill.schedules.cron import MAX_CRON_CHARS, MAX_TIMEZONE_CHARS, find_timezone
from vectormill.schedules.schedule import OVERLAPS, SCHEDULE_NAME, Schedule, ScheduledRun

CRON_DESCRIPTION = (
    "Minute, hour, day of the month, month, day of the week, as in a crontab; or @hourly, @daily, @weekly, @monthly, "
    "@yearly."
)
TIMEZONE_DESCRIPTION = "A name of the tz database; its clock is the one that the expression means."
OVERLAP_DESCRIPTION = (
    "What becomes of a due time while a run of the collection goes on: it passes, or its run waits."
)

Overlap = Literal["skip", "queue"]


class ScheduleRequest(BaseModel):
    """A new schedule. Without a name it is called as its collection."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "collection": "docs",
                "cron": "0 2 * * *",
                "timezone": "Europe/Berlin",
                "overlap": "skip",
            }
        },
    )

    collection: str = Field(max_length=63)
    cron: str = Field(max_length=MAX_CRON_CHARS, description=CRON_DESCRIPTION)
    timezone: str = Field(default="UTC", max_length=MAX_TIMEZONE_CHARS, description=TIMEZONE_DESCRIPTION)
    overlap: Overlap = Field(default="skip", description=OVERLAP_DESCRIPTION)
    name: str | None = Field(default=None, json_schema_extra={"pattern": f"^{SCHEDULE_NAME.pattern}$"})


class ScheduleChange(BaseModel):
    """What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"cron": "30 4 * * *"}})

    cron: str | None = Field(default=None, max_length=MAX_CRON_CHARS, description=CRON_DESCRIPTION)
    timezone: str | None = Field(
        default=None, max_length=MAX_TIMEZONE_CHARS, description=TIMEZONE_DESCRIPTION
    )
    overlap: Overlap | None = Field(default=None, description=OVERLAP_DESCRIPTION)


class ScheduleBody(BaseModel):
    """A schedule, in the same shape wherever it is answered."""

    name: str
    collection: str
    cron: str
    timezone: str
    overlap: str = Field(json_schema_extra={"enum": list(OVERLAPS)})
    next_due_at: datetime | None = Field(description="In UTC; null while it is paused.")
    next_due_local: str | None = Field(
        description="The same moment on the clock of its zone, with the offset."
    )
    lag_seconds: float = Field(
        description="How long a due time has waited for a scheduler; 0 when none does."
    )
    paused_at: datetime | None = Field(description="Null unless it is paused.")
    last_state: str | None = Field(
        description="Of its newest run.", json_schema_extra={"enum": [*RUN_STATES, None]}
    )
    last_run_at: datetime | None = Field(description="When its newest run was made.")
    last_success_at: datetime | None = Field(description="When a run last ended well.")
    consecutive_failures: int = Field(description="Runs that failed since the last success.")
    skipped_since_success: int = Field(description="Due times since then that passed because of an overlap.")
    last_error: str | None = Field(description="Why the newest of these failed or was skipped.")
    created_at: datetime
    updated_at: datetime

    @classmethod
    def from_schedule(cls, schedule: Schedule) -> Self:
        due_at = None if schedule.paused_at is not None else schedule.next_due_at
        return cls(
            name=schedule.name,
            collection=schedule.collection,
            cron=schedule.cron,
            timezone=schedule.timezone,
            overlap=schedule.overlap,
            next_due_at=in_utc(due_at),
            next_due_local=in_zone(due_at, schedule.timezone),
            lag_seconds=schedule.lag_seconds,
            paused_at=in_utc(schedule.paused_at),
            last_state=schedule.last_state,
            last_run_at=in_utc(schedule.last_run_at),
            last_success_at=in_utc(schedule.last_success_at),
            consecutive_failures=schedule.num_failures,
            skipped_since_success=schedule.num_skipped,
            last_error=schedule.last_error,
            created_at=schedule.created_at.astimezone(UTC),
            updated_at=schedule.updated_at.astimezone(UTC),
        )


def in_zone(moment: datetime | None, timezone: str) -> str | None:
    """The moment as a clock of the zone shows it, in ISO 8601; None where this machine does not know the zone."""
    if moment is None:
        return None
    try:
        return moment.astimezone(find_timezone(timezone)).isoformat()
    except InvalidOption:
        return None


class SchedulePage(BaseModel):
    data: list[ScheduleBody]
    next: str | None = Field(description="Given as `after` for the next page; null on the last.")


class ScheduledRunBody(BaseModel):
    """A run in a schedule's history. GET /v1/runs/{id} has all of it."""

    id: UUID
    state: str = Field(json_schema_extra={"enum": list(RUN_STATES)})
    phase: str | None = Field(json_schema_extra={"enum": [*RUN_PHASES, None]})
    due_at: datetime | None = Field(description="Null for one that a client asked for.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    counts: dict[str, int] = Field(description="Rows of the source by what became of them.")
    error: str | None = Field(description="Why it failed or was skipped.")

    @classmethod
    def from_run(cls, run: ScheduledRun) -> Self:
        values: dict[str, Any] = {
            name: in_utc(getattr(run, name)) for name in ("due_at", "created_at", "started_at", "finished_at")
        }
        return cls(
            id=run.id, state=run.state, phase=run.phase, counts=asdict(run.counts), error=run.error, **values
        )


class ScheduledRunPage(BaseModel):
    data: list[ScheduledRunBody]
    next: str | None = Field(description="Given as `after` for the next page; null on the last.")
