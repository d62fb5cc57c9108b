"""Workers and the health of a service as the API and the client return them."""

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from vectormill.moments import Moment
from vectormill.operation import Identifier


class WorkerBody(TypedDict):
    """A live worker, with its report on its devices, its plan and its speed."""

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


class Root(TypedDict):
    """The paths at which a visitor of an API begins."""

    name: str
    console: str
    reference: str
    openapi: str
    readiness: str


class Liveness(TypedDict):
    """A sign of life of an API process."""

    status: str


class ScheduleHealth(TypedDict):
    """Health of all schedules. It never makes the API unready."""

    schedules: int
    paused: int
    failing: Annotated[
        int, Meta(description="Schedules whose latest run failed, apart from skipped and cancelled ones.")
    ]
    overdue: Annotated[
        int, Meta(description="Schedules overdue by a minute without a run: no scheduler is at work.")
    ]


class Readiness(TypedDict):
    """`ok`, `degraded` (no Redis: jobs are accepted but wait) or `unavailable` (no Postgres)."""

    status: str
    postgres: bool
    redis: bool
    workers: int
    failing_workers: Annotated[
        int, Meta(description="Workers that run but cannot load their model; not counted in `workers`.")
    ]
    scheduler: bool
    indexer: bool
    schedules: Annotated[ScheduleHealth | None, Meta(description="Null while Postgres is unavailable.")]
