"""Answers about runs, as the API describes them. Made by `python -m tools.client`."""

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
