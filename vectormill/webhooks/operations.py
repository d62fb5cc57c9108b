"""The API's operations on webhooks and their deliveries, with the JSON bodies.

All need a key of scope webhooks: a webhook makes the server connect to a URL of the client's choice, and that
URL may be secret.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, TypedDict

from msgspec import Meta, Struct

from vectormill.keys.api_key import WEBHOOKS
from vectormill.moments import Moment, format_moment
from vectormill.operation import NO_CONTENT, NextCursor, Nothing, Operation, PageQuery, describe, one_of
from vectormill.webhooks.webhook import (
    DELIVERY_STATES,
    EVENTS,
    LONGEST_ROTATION_SECONDS,
    MAX_DESCRIPTION_CHARS,
    MAX_URL_CHARS,
    ROTATION_SECONDS,
    TEST_EVENT,
    Delivery,
    DeliveryState,
    name_message,
)

Url = Annotated[
    str,
    Meta(
        max_length=MAX_URL_CHARS,
        description="https or http. Private addresses are refused unless VECTORMILL_WEBHOOK_PRIVATE_TARGETS allows "
        "them.",
    ),
]
Event = Annotated[str, one_of(EVENTS)]
Events = Annotated[
    Sequence[Event],
    Meta(max_length=len(EVENTS), description="The events to send. By default all."),
]
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)]


class WebhookRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A new webhook."""

    url: Url
    events: Events = ()
    description: Description = ""


class WebhookChange(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A change of a webhook; omitted fields stay unchanged."""

    url: Url | None = None
    events: Events | None = None
    description: Description | None = None
    is_enabled: Annotated[bool | None, Meta(description="Enabling a webhook clears its failures.")] = None


class RotationRequest(Struct, forbid_unknown_fields=True):
    """The way in which a secret is changed."""

    grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=LONGEST_ROTATION_SECONDS,
            description="For this many seconds messages are also signed with the former secret.",
        ),
    ] = ROTATION_SECONDS


class ReplayRequest(Struct, forbid_unknown_fields=True):
    """The deliveries to send again."""

    since: Annotated[
        datetime, Meta(tz=True, description="Only deliveries of events since then are sent again.")
    ]


class DeliveryQuery(PageQuery, kw_only=True):
    """The page of deliveries that a client asks for."""

    state: DeliveryState | None = None


class WebhookBody(TypedDict):
    """A webhook. Its secret is shown when it is created, and never again."""

    id: int
    url: str
    description: str
    events: list[Event]
    is_enabled: bool
    disabled_reason: Annotated[str | None, Meta(description="Null while it is enabled.")]
    failing_since: Annotated[Moment | None, Meta(description="The first failure since the last success.")]
    former_secret_until: Annotated[
        Moment | None, Meta(description="Until then messages are signed with both secrets.")
    ]
    num_delivered: Annotated[int, Meta(description="Messages that were delivered.")]
    num_refused: Annotated[int, Meta(description="Attempts that failed.")]
    num_failed: Annotated[int, Meta(description="Messages that failed for good.")]
    created_at: Moment
    updated_at: Moment


class NewWebhookBody(WebhookBody):
    """A webhook with its secret, with which the receiver verifies messages. It is shown only this once."""

    secret: str


class WebhookPage(TypedDict):
    data: list[WebhookBody]
    next: NextCursor


class DeliveryBody(TypedDict):
    """An event for a webhook, and the state of its delivery."""

    id: int
    message_id: Annotated[str, Meta(description="The header `webhook-id`, the same for every attempt.")]
    type: Annotated[str, one_of((*EVENTS, TEST_EVENT))]
    state: Annotated[DeliveryState, one_of(DELIVERY_STATES)]
    num_attempts: int
    status_code: Annotated[
        int | None, Meta(description="The status code of the latest attempt; null if no answer came.")
    ]
    error: Annotated[str | None, Meta(description="Why the latest attempt failed.")]
    next_attempt_at: Annotated[Moment | None, Meta(description="Null once the delivery has ended.")]
    attempted_at: Moment | None
    ended_at: Moment | None
    created_at: Moment
    payload: Annotated[dict[str, Any], Meta(description="The message that is sent.")]


class DeliveryPage(TypedDict):
    data: list[DeliveryBody]
    next: NextCursor


class ReplayedBody(TypedDict):
    num_replayed: int


def describe_delivery(delivery: Delivery) -> DeliveryBody:
    """Return the JSON body that describes the delivery."""
    return describe(
        DeliveryBody,
        delivery,
        message_id=name_message(delivery.event_id),
        type=delivery.event_type,
        next_attempt_at=format_moment(delivery.due_at),
        payload=json.loads(delivery.payload),
    )


ALL: Final = "/v1/webhooks"
ONE: Final = "/v1/webhooks/{webhook_id}"
DELIVERIES: Final = ONE + "/deliveries"
DELIVERY: Final = DELIVERIES + "/{delivery_id}"

CREATE: Final = Operation(
    "POST", ALL, WEBHOOKS, NewWebhookBody, WebhookRequest, status=201, location="/v1/webhooks/{id}",
    example={
        "url": "https://example.com/vectormill",
        "events": ["job.completed", "job.failed"],
        "description": "Notifies the search team.",
    },
)  # fmt: skip
LIST: Final = Operation("GET", ALL, WEBHOOKS, WebhookPage, query=PageQuery)
SHOW: Final = Operation("GET", ONE, WEBHOOKS, WebhookBody)
CHANGE: Final = Operation("PATCH", ONE, WEBHOOKS, WebhookBody, WebhookChange, example={"is_enabled": True})
DELETE: Final = Operation("DELETE", ONE, WEBHOOKS, Nothing, status=NO_CONTENT)
# A client does not retry this: each attempt makes a new secret, and only the last two are kept.
ROTATE: Final = Operation(
    "POST", ONE + "/rotate-secret", WEBHOOKS, NewWebhookBody, RotationRequest, is_repeatable=False,
    example={"grace_seconds": 86400},
)  # fmt: skip
TEST: Final = Operation("POST", ONE + "/test", WEBHOOKS, DeliveryBody, status=202, is_repeatable=False)
REPLAY_FAILED: Final = Operation(
    "POST", ONE + "/replay", WEBHOOKS, ReplayedBody, ReplayRequest, status=202,
    example={"since": "2026-11-23T00:00:00Z"},
)  # fmt: skip
LIST_DELIVERIES: Final = Operation("GET", DELIVERIES, WEBHOOKS, DeliveryPage, query=DeliveryQuery)
SHOW_DELIVERY: Final = Operation("GET", DELIVERY, WEBHOOKS, DeliveryBody)
REPLAY: Final = Operation("POST", DELIVERY + "/replay", WEBHOOKS, DeliveryBody, status=202)
