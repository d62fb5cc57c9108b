"""Webhooks over HTTP: created, shown, changed, tested and deleted; secrets rotated, deliveries replayed."""

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path
from sqlalchemy import Connection

from api.dependencies import Resources, ResourcesDependency
from api.intake.requests import IdempotencyKey
from api.serving import cut_page, decode_cursor, serve
from vectormill.db.idempotency import make_once
from vectormill.domain.errors import DeliveryNotFound, InvalidOption, WebhookNotFound
from vectormill.operation import PageQuery, describe
from vectormill.webhooks import operations
from vectormill.webhooks.operations import (
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
    describe_delivery,
)
from vectormill.webhooks.webhook import check_events, check_url, make_secret
from vectormill.webhooks.webhooks import (
    change_webhook,
    create_webhook,
    delete_webhook,
    find_delivery,
    find_first_secret,
    find_webhook,
    list_deliveries,
    list_webhooks,
    post_test,
    replay_delivery,
    replay_failed,
    rotate_secret,
)

router = APIRouter(tags=["webhooks"])

# The largest bigint of Postgres, and so the largest id.
LARGEST_ID = 2**63 - 1


def parse_webhook_id(webhook_id: Annotated[str, Path(description="The webhook's id, a number.")]) -> int:
    """Parse a webhook's id. Raise WebhookNotFound if it is not a number."""
    return parse_id(webhook_id, WebhookNotFound)


def parse_delivery_id(delivery_id: Annotated[str, Path(description="The delivery's id, a number.")]) -> int:
    """Parse a delivery's id. Raise DeliveryNotFound if it is not a number."""
    return parse_id(delivery_id, DeliveryNotFound)


def parse_id(written: str, missing: type[WebhookNotFound] | type[DeliveryNotFound]) -> int:
    if not (written.isascii() and written.isdigit() and len(written) < 20 and int(written) <= LARGEST_ID):
        raise missing
    return int(written)


WebhookId = Annotated[int, Depends(parse_webhook_id)]
DeliveryId = Annotated[int, Depends(parse_delivery_id)]


def check_target(resources: Resources, url: str) -> str:
    return check_url(url, allows_private=resources.settings.webhook_private_targets)


def check_text(text: str) -> str:
    """Return the text. Raise InvalidOption if it has characters that cannot be stored or shown."""
    if "\0" in text or not text.isprintable():
        raise InvalidOption("The description contains characters that cannot be shown; remove them.")
    return text


@serve(router, operations.CREATE)
def post_webhook(
    body: WebhookRequest, resources: ResourcesDependency, idempotency_key: IdempotencyKey
) -> NewWebhookBody:
    """Create a webhook that receives a signed message when a job or run ends.

    The secret is returned only here, and again if the request is repeated with the same Idempotency-Key.
    """
    url, events, description = check_target(resources, body.url), check_events(body.events), body.description

    def make() -> str:
        return str(create_webhook(connection, url, check_text(description), events, make_secret()).id)

    content = msgspec.json.encode(body)
    with resources.engine.begin() as connection:
        webhook_id = int(make_once(connection, "webhook", idempotency_key, content, make))
        webhook, secret = find_webhook(connection, webhook_id), find_first_secret(connection, webhook_id)
    return describe(NewWebhookBody, webhook, secret=secret)


@serve(router, operations.LIST)
def get_webhooks(connection: Connection, query: PageQuery) -> WebhookPage:
    """List webhooks, oldest first."""
    found = list_webhooks(connection, after=decode_cursor(query.after), limit=query.limit + 1)
    page, cursor = cut_page(found, query.limit, lambda webhook: webhook.id)
    return WebhookPage(data=[describe(WebhookBody, webhook) for webhook in page], next=cursor)


@serve(router, operations.SHOW)
def get_webhook(connection: Connection, webhook_id: WebhookId) -> WebhookBody:
    """Show one webhook: whether it is enabled, and how many messages were delivered, refused and given up."""
    return describe(WebhookBody, find_webhook(connection, webhook_id))


@serve(router, operations.CHANGE)
def patch_webhook(
    resources: ResourcesDependency, connection: Connection, webhook_id: WebhookId, body: WebhookChange
) -> WebhookBody:
    """Change the URL or the events of a webhook, disable it, or enable it again."""
    changed = change_webhook(
        connection,
        webhook_id,
        url=None if body.url is None else check_target(resources, body.url),
        description=None if body.description is None else check_text(body.description),
        events=None if body.events is None else check_events(body.events),
        is_enabled=body.is_enabled,
    )
    return describe(WebhookBody, changed)


@serve(router, operations.DELETE)
def remove_webhook(connection: Connection, webhook_id: WebhookId) -> None:
    """Delete the webhook and its deliveries; nothing more is sent to it."""
    delete_webhook(connection, webhook_id)


@serve(router, operations.ROTATE)
def post_rotation(connection: Connection, webhook_id: WebhookId, body: RotationRequest) -> NewWebhookBody:
    """Create a new secret, which only this response shows. For a while, messages are signed with the old one too."""
    secret = make_secret()
    webhook = rotate_secret(connection, webhook_id, secret, body.grace_seconds)
    return describe(NewWebhookBody, webhook, secret=secret)


@serve(router, operations.TEST)
def post_test_event(connection: Connection, webhook_id: WebhookId) -> DeliveryBody:
    """Send a `webhook.test` event and return its delivery; GET …/deliveries/{id} shows how it ended."""
    return describe_delivery(post_test(connection, webhook_id, datetime.now(UTC)))


@serve(router, operations.REPLAY_FAILED)
def post_replay(connection: Connection, webhook_id: WebhookId, body: ReplayRequest) -> ReplayedBody:
    """Resend all messages that were given up, for events since a point in time."""
    return ReplayedBody(num_replayed=replay_failed(connection, webhook_id, body.since))


@serve(router, operations.LIST_DELIVERIES)
def get_deliveries(connection: Connection, webhook_id: WebhookId, query: DeliveryQuery) -> DeliveryPage:
    """List the events of a webhook, newest first, with the state of their delivery."""
    find_webhook(connection, webhook_id)
    found = list_deliveries(
        connection,
        webhook_id,
        state=query.state,
        before=decode_cursor(query.after),
        limit=query.limit + 1,
    )
    page, cursor = cut_page(found, query.limit, lambda delivery: delivery.id)
    return DeliveryPage(data=[describe_delivery(delivery) for delivery in page], next=cursor)


@serve(router, operations.SHOW_DELIVERY)
def get_delivery(connection: Connection, webhook_id: WebhookId, delivery_id: DeliveryId) -> DeliveryBody:
    """Show one event of a webhook, with the state of its delivery."""
    return describe_delivery(find_delivery(connection, webhook_id, delivery_id))


@serve(router, operations.REPLAY)
def post_delivery_replay(
    connection: Connection, webhook_id: WebhookId, delivery_id: DeliveryId
) -> DeliveryBody:
    """Resend a message, whatever its state, with the same `webhook-id`."""
    return describe_delivery(replay_delivery(connection, webhook_id, delivery_id))
