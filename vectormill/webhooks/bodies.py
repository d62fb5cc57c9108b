"""Webhooks and their deliveries as the API takes and answers them."""

import json
from datetime import datetime
from typing import Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from vectormill.moments import in_utc
from vectormill.webhooks.webhook import (
    DELIVERY_STATES,
    EVENTS,
    LONGEST_ROTATION_SECONDS,
    MAX_DESCRIPTION_CHARS,
    MAX_URL_CHARS,
    ROTATION_SECONDS,
    TEST_EVENT,
    Delivery,
    Webhook,
    name_message,
)

URL_DESCRIPTION = (
    "https or http. Private addresses are refused unless VECTORMILL_WEBHOOK_PRIVATE_TARGETS allows them."
)
EVENTS_DESCRIPTION = "What it is told of; all events where none is named."

DeliveryState = Literal["pending", "delivered", "failed"]


class WebhookRequest(BaseModel):
    """A new webhook."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "url": "https://example.com/vectormill",
                "events": ["job.completed", "job.failed"],
                "description": "Tells the search team.",
            }
        },
    )

    url: str = Field(max_length=MAX_URL_CHARS, description=URL_DESCRIPTION)
    events: list[str] = Field(
        default=[],
        max_length=len(EVENTS),
        description=EVENTS_DESCRIPTION,
        json_schema_extra={"items": {"type": "string", "enum": list(EVENTS)}},
    )
    description: str = Field(default="", max_length=MAX_DESCRIPTION_CHARS)


class WebhookChange(BaseModel):
    """What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"is_enabled": True}})

    url: str | None = Field(default=None, max_length=MAX_URL_CHARS, description=URL_DESCRIPTION)
    events: list[str] | None = Field(
        default=None,
        max_length=len(EVENTS),
        description=EVENTS_DESCRIPTION,
    )
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION_CHARS)
    is_enabled: bool | None = Field(default=None, description="Enabled again, its failures are forgotten.")


class RotationRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"grace_seconds": 86400}})

    grace_seconds: float = Field(
        default=ROTATION_SECONDS,
        ge=0,
        le=LONGEST_ROTATION_SECONDS,
        description="So long messages carry a signature by the former secret too.",
    )


class ReplayRequest(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"since": "2026-11-23T00:00:00Z"}}
    )

    since: AwareDatetime = Field(description="Deliveries of older events stay given up.")


class WebhookBody(BaseModel):
    """A webhook, in the same shape wherever it is answered. Its secret is shown when it is made, and never again."""

    id: int
    url: str
    description: str
    events: list[str] = Field(json_schema_extra={"items": {"type": "string", "enum": list(EVENTS)}})
    is_enabled: bool
    disabled_reason: str | None = Field(description="Null while it is enabled.")
    failing_since: datetime | None = Field(description="The first failure since the last success.")
    former_secret_until: datetime | None = Field(description="Until then messages carry two signatures.")
    num_delivered: int = Field(description="Messages that were taken.")
    num_refused: int = Field(description="Attempts that failed.")
    num_failed: int = Field(description="Messages that were given up.")
    created_at: datetime
    updated_at: datetime

    @classmethod
    def from_webhook(cls, webhook: Webhook, **more: Any) -> Self:
        return cls(
            id=webhook.id,
            url=webhook.url,
            description=webhook.description,
            events=list(webhook.events),
            is_enabled=webhook.is_enabled,
            disabled_reason=webhook.disabled_reason,
            failing_since=in_utc(webhook.failing_since),
            former_secret_until=in_utc(webhook.former_secret_until),
            num_delivered=webhook.num_delivered,
            num_refused=webhook.num_refused,
            num_failed=webhook.num_failed,
            created_at=in_utc(webhook.created_at),
            updated_at=in_utc(webhook.updated_at),
            **more,
        )


class NewWebhookBody(WebhookBody):
    """With the secret by which its receiver knows our messages. It is shown this once."""

    secret: str


class WebhookPage(BaseModel):
    data: list[WebhookBody]
    next: str | None = Field(description="Given as `after` for the next page; null on the last.")


class DeliveryBody(BaseModel):
    """An event for a webhook, and what became of it."""

    id: int
    message_id: str = Field(description="The header `webhook-id`, the same at every attempt.")
    type: str = Field(json_schema_extra={"enum": [*EVENTS, TEST_EVENT]})
    state: str = Field(json_schema_extra={"enum": list(DELIVERY_STATES)})
    num_attempts: int
    status_code: int | None = Field(description="Of the newest attempt; null where no answer came.")
    error: str | None = Field(description="Why the newest attempt failed.")
    next_attempt_at: datetime | None = Field(description="Null when it has ended.")
    attempted_at: datetime | None
    ended_at: datetime | None
    created_at: datetime
    payload: dict[str, Any] = Field(description="What is sent.")

    @classmethod
    def from_delivery(cls, delivery: Delivery) -> Self:
        return cls(
            id=delivery.id,
            message_id=name_message(delivery.event_id),
            type=delivery.event_type,
            state=delivery.state,
            num_attempts=delivery.num_attempts,
            status_code=delivery.status_code,
            error=delivery.error,
            next_attempt_at=in_utc(delivery.due_at),
            attempted_at=in_utc(delivery.attempted_at),
            ended_at=in_utc(delivery.ended_at),
            created_at=in_utc(delivery.created_at),
            payload=json.loads(delivery.payload),
        )


class DeliveryPage(BaseModel):
    data: list[DeliveryBody]
    next: str | None = Field(description="Given as `after` for the next page; null on the last.")


class ReplayedBody(BaseModel):
    num_replayed: int
