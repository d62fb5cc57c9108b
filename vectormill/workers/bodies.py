"""Workers and the health of a service as the API answers them, and as the client returns them."""

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from vectormill.moments import Moment
from vectormill.operation import Identifier


class WorkerBody(TypedDict):
    """A live worker, with what it reports of its devices, its plan and its speed."""

    name: str
    incarnation: Identifier
    model: str
    slots: int
    report: dict[str, Any]
    started_at: Moment
    heartbeat_at: Moment


class WorkerList(TypedDict):
    """All live workers."""

    data: list[WorkerBody]


class Liveness(TypedDict):
    """A sign of life of an API process."""

    status: str


class ScheduleHealth(TypedDict):
    """Health of all schedules. It never makes the API unready."""

    schedules: int
    paused: int
    failing: Annotated[int, Meta(description="Whose newest run that ended by itself failed.")]
    overdue: Annotated[
        int, Meta(description="Past their due time for a minute without a run: no scheduler looks.")
    ]


class Readiness(TypedDict):
    """`ok`, `degraded` (Redis is away: jobs are taken, and wait) or `unavailable` (Postgres is away)."""

    status: str
    postgres: bool
    redis: bool
    workers: int
    failing_workers: Annotated[
        int, Meta(description="Workers that run and cannot load their model; `workers` leaves them out.")
    ]
    scheduler: bool
    indexer: bool
    schedules: Annotated[ScheduleHealth | None, Meta(description="Null while Postgres is away.")]
