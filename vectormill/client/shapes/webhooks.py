"""Answers about webhooks, as the API describes them. Made by `python -m tests.architecture.derived`."""

from typing import Any, Literal, TypedDict


class WebhookBody(TypedDict):
    """A webhook, in the same shape wherever it is answered. Its secret is shown when it is made, and never
    again.
    """

    id: int
    url: str
    description: str
    events: list[
        Literal[
            "job.completed",
            "job.completed_with_errors",
            "job.failed",
            "job.cancelled",
            "run.completed",
            "run.completed_with_errors",
            "run.failed",
            "run.cancelled",
            "run.skipped",
            "run.held",
        ]
    ]
    is_enabled: bool
    disabled_reason: str | None
    failing_since: str | None
    former_secret_until: str | None
    num_delivered: int
    num_refused: int
    num_failed: int
    created_at: str
    updated_at: str


class NewWebhookBody(TypedDict):
    """With the secret by which its receiver knows our messages. It is shown this once."""

    id: int
    url: str
    description: str
    events: list[
        Literal[
            "job.completed",
            "job.completed_with_errors",
            "job.failed",
            "job.cancelled",
            "run.completed",
            "run.completed_with_errors",
            "run.failed",
            "run.cancelled",
            "run.skipped",
            "run.held",
        ]
    ]
    is_enabled: bool
    disabled_reason: str | None
    failing_since: str | None
    former_secret_until: str | None
    num_delivered: int
    num_refused: int
    num_failed: int
    created_at: str
    updated_at: str
    secret: str


class DeliveryBody(TypedDict):
    """An event for a webhook, and what became of it."""

    id: int
    message_id: str
    type: Literal[
        "job.completed",
        "job.completed_with_errors",
        "job.failed",
        "job.cancelled",
        "run.completed",
        "run.completed_with_errors",
        "run.failed",
        "run.cancelled",
        "run.skipped",
        "run.held",
        "webhook.test",
    ]
    state: Literal["pending", "delivered", "failed"]
    num_attempts: int
    status_code: int | None
    error: str | None
    next_attempt_at: str | None
    attempted_at: str | None
    ended_at: str | None
    created_at: str
    payload: dict[str, Any]


class ReplayedBody(TypedDict):
    num_replayed: int
