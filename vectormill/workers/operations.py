"""API operations on workers, and on the health of a service, with what they answer."""

from dataclasses import replace
from typing import Annotated, Any, Final, TypedDict

from msgspec import Meta

from vectormill.keys.api_key import READ
from vectormill.moments import Moment
from vectormill.operation import Identifier, Operation


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


LIST: Final = Operation("GET", "/v1/workers", READ, WorkerList)
# A browser is led from here to the console.
SHOW_ROOT: Final = Operation("GET", "/", None, Root)
SHOW_LIVENESS: Final = Operation("GET", "/livez", None, Liveness)
SHOW_READINESS: Final = Operation("GET", "/readyz", None, Readiness, other_status=503)
# This route exists for clients of text-embeddings-inference, which has it.
SHOW_HEALTH: Final = replace(SHOW_READINESS, path="/health")
SHOW_METRICS: Final = Operation("GET", "/metrics", READ, bytes, media_types=("text/plain",))
