"""Answers about service, as the API describes them. Made by `python -m tools.client`."""

from typing import Any, NotRequired, TypedDict


class ModelBody(TypedDict):
    """A registered model. Its card's fields are null when its files cannot be read; `problem` says why."""

    id: str
    object: NotRequired[str]
    created: NotRequired[int]
    owned_by: NotRequired[str]
    name: str
    task: NotRequired[str | None]
    dimension: NotRequired[int | None]
    max_tokens: NotRequired[int | None]
    pooling: NotRequired[str | None]
    normalize: NotRequired[bool | None]
    prompts: NotRequired[dict[str, str]]
    revision: NotRequired[str | None]
    workers: int
    problem: NotRequired[str | None]
    notes: NotRequired[list[str]]
    unprompted: NotRequired[str | None]


class ModelList(TypedDict):
    object: NotRequired[str]
    data: list[ModelBody]


class WorkerBody(TypedDict):
    name: str
    incarnation: str
    model: str
    slots: int
    report: dict[str, Any]
    started_at: str
    heartbeat_at: str


class WorkerList(TypedDict):
    data: list[WorkerBody]


class ScheduleHealth(TypedDict):
    """Health of all schedules. It never makes the API unready."""

    schedules: int
    paused: int
    failing: int
    overdue: int


class Readiness(TypedDict):
    """`ok`, `degraded` (Redis is away: jobs are taken, and wait) or `unavailable` (Postgres is away)."""

    status: str
    postgres: bool
    redis: bool
    workers: int
    failing_workers: int
    scheduler: bool
    indexer: bool
    schedules: ScheduleHealth | None
