"""Answers about runs, as the API describes them. Made by `python -m tests.architecture.derived`."""

from typing import Any, Literal, TypedDict


class EncodingBody(TypedDict):
    """How far the job of a run is."""

    num_items: int
    num_done: int
    num_failed: int
    items_per_second: float
    eta_seconds: float | None


class RunBody(TypedDict):
    """A run, in the same shape wherever it is answered."""

    id: str
    collection: str
    kind: Literal["reindex", "index", "check"]
    state: Literal[
        "uploading",
        "queued",
        "running",
        "held",
        "cancelling",
        "completed",
        "completed_with_errors",
        "failed",
        "cancelled",
        "skipped",
    ]
    phase: str | None
    counts: dict[str, int]
    job_id: str | None
    encoding: EncodingBody | None
    spec: dict[str, Any] | None
    options: dict[str, Any]
    report: dict[str, Any]
    error: str | None
    due_at: str | None
    attempt: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    elapsed_seconds: float


class ScheduleBody(TypedDict):
    """A schedule, in the same shape wherever it is answered."""

    name: str
    collection: str
    cron: str
    timezone: str
    overlap: Literal["skip", "queue"]
    next_due_at: str | None
    next_due_local: str | None
    lag_seconds: float
    paused_at: str | None
    last_state: str | None
    last_run_at: str | None
    last_success_at: str | None
    consecutive_failures: int
    skipped_since_success: int
    last_error: str | None
    created_at: str
    updated_at: str


class ScheduledRunBody(TypedDict):
    """A run in a schedule's history. GET /v1/runs/{id} has all of it."""

    id: str
    state: Literal[
        "uploading",
        "queued",
        "running",
        "held",
        "cancelling",
        "completed",
        "completed_with_errors",
        "failed",
        "cancelled",
        "skipped",
    ]
    phase: str | None
    due_at: str | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    counts: dict[str, int]
    error: str | None
