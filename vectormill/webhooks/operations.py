"""The API's operations on webhooks.

All need a key of scope webhooks: a webhook makes the server connect to a URL of the client's choice, and that
URL may be secret.
"""

from typing import Final

from vectormill.keys.api_key import WEBHOOKS
from vectormill.operation import NO_CONTENT, Nothing, Operation, PageQuery
from vectormill.webhooks.bodies import (
    DeliveryBody,
    DeliveryPage,
    DeliveryQuery,
    NewWebhookBody,
    ReplayedBody,
    ReplayRequest,
    RotationRequest,
    WebhookBody,
    WebhookChange,
    WebhookPage,
    WebhookRequest,
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
