"""Webhooks and their deliveries in the database, for tests."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine

from tests.database import ask, execute
from vectormill.webhooks.webhook import Delivery, Webhook, check_events, make_secret
from vectormill.webhooks.webhooks import create_webhook, find_delivery, find_webhook, list_deliveries


def make_webhook(
    engine: Engine, url: str = "https://example.com/", events: Sequence[str] = ()
) -> tuple[int, str]:
    """Make a webhook; return its id and its secret."""
    secret = make_secret()
    return ask(engine, create_webhook, url, "", check_events(events), secret).id, secret


def look_at(engine: Engine, webhook_id: int) -> Webhook:
    return ask(engine, find_webhook, webhook_id)


def deliveries_of(engine: Engine, webhook_id: int, state: str | None = None) -> list[Delivery]:
    """Return the deliveries of a webhook, oldest first."""
    with engine.connect() as connection:
        return list(list_deliveries(connection, webhook_id, state=state, limit=1000))[::-1]


def delivery_of(engine: Engine, delivery: Delivery) -> Delivery:
    return ask(engine, find_delivery, delivery.webhook_id, delivery.id)


def events_of(engine: Engine, webhook_id: int) -> list[dict[str, Any]]:
    return [json.loads(delivery.payload) for delivery in deliveries_of(engine, webhook_id)]


def make_deliveries_due(engine: Engine) -> None:
    """Make pending deliveries due, as if their backoff or their lease were over."""
    execute(
        engine,
        "UPDATE vectormill.webhook_deliveries SET due_at = now(), lease_until = NULL WHERE state = 'pending'",
    )
