"""Answers about jobs, as the API describes them. Made by `python -m tools.client`."""

from typing import Any, Literal, TypedDict


class StageBody(TypedDict):
    seconds: float
    share: float


class BottleneckBody(TypedDict):
    value: str
    reason: str


class JobBody(TypedDict):
    """A job, in the same shape wherever it is answered."""

    id: str
    state: Literal[
        "uploading",
        "queued",
        "running",
        "paused",
        "cancelling",
        "completed",
        "completed_with_errors",
        "failed",
        "cancelled",
    ]
    waiting_because: str | None
    model: str
    collection: str | None
    priority: int
    num_items: int
    num_done: int
    num_failed: int
    num_chunks: int
    num_retried_chunks: int
    num_tokens: int
    truncated_items: int
    num_passages: int
    num_reused: int
    created_at: str
    started_at: str | None
    finished_at: str | None
    paused_at: str | None
    items_per_second: float
    tokens_per_second: float
    eta_seconds: float | None
    padding_waste: float
    stages: dict[str, StageBody]
    bound_by: BottleneckBody | None
    stage_seconds: dict[str, float]
    options: dict[str, Any]
    metadata: dict[str, Any]
    twin_of: str | None


class ItemErrorBody(TypedDict):
    key: str
    code: str
    detail: str


class TruncatedItemBody(TypedDict):
    key: str
