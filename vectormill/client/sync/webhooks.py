# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Calls for webhooks."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from vectormill.client.requests import make_key_header
from vectormill.client.sync.transport import Transport
from vectormill.webhooks import operations
from vectormill.webhooks.operations import (
    DeliveryBody,
    NewWebhookBody,
    ReplayRequest,
    RotationRequest,
    WebhookBody,
    WebhookChange,
    WebhookRequest,
)
from vectormill.webhooks.webhook import ROTATION_SECONDS


class WebhookCalls(Transport):
    """Calls for webhooks, which report ends of jobs and runs. All need a key of the scope webhooks."""

    def create_webhook(
        self,
        url: str,
        *,
        events: Sequence[str] = (),
        description: str = "",
        idempotency_key: str | None = None,
    ) -> NewWebhookBody:
        """Create a webhook for these events, or for all.

        The answer has its `secret`, which is shown only this once.
        """
        body = WebhookRequest(url, tuple(events), description)
        return self.ask(operations.CREATE, body=body, headers=make_key_header(idempotency_key))

    def webhooks(self) -> Iterator[WebhookBody]:
        """Yield every webhook, oldest first, page by page."""
        return self.pages(WebhookBody, operations.LIST)

    def webhook(self, webhook_id: int) -> WebhookBody:
        """Return the webhook with this id."""
        return self.ask(operations.SHOW, webhook_id)

    def change_webhook(
        self,
        webhook_id: int,
        *,
        url: str | None = None,
        events: Sequence[str] | None = None,
        description: str | None = None,
        is_enabled: bool | None = None,
    ) -> WebhookBody:
        """Change a webhook; arguments that are None keep their value. Enabling clears its failures."""
        told = None if events is None else tuple(events)
        return self.ask(operations.CHANGE, webhook_id, body=WebhookChange(url, told, description, is_enabled))

    def rotate_webhook_secret(self, webhook_id: int, *, grace_seconds: float | None = None) -> NewWebhookBody:
        """Create a new `secret`.

        For `grace_seconds`, a day by default, messages are signed with the old secret as well.
        """
        body = RotationRequest(ROTATION_SECONDS if grace_seconds is None else grace_seconds)
        return self.ask(operations.ROTATE, webhook_id, body=body)

    def test_webhook(self, webhook_id: int) -> DeliveryBody:
        """Send an event `webhook.test` and return its delivery."""
        return self.ask(operations.TEST, webhook_id)

    def delete_webhook(self, webhook_id: int) -> None:
        """Delete a webhook with its deliveries."""
        self.ask(operations.DELETE, webhook_id)

    def webhook_deliveries(self, webhook_id: int, *, state: str | None = None) -> Iterator[DeliveryBody]:
        """Yield every delivery of a webhook, newest first, page by page.

        `state` is pending, delivered or failed.
        """
        return self.pages(DeliveryBody, operations.LIST_DELIVERIES, webhook_id, state=state)

    def webhook_delivery(self, webhook_id: int, delivery_id: int) -> DeliveryBody:
        """Return one delivery of a webhook."""
        return self.ask(operations.SHOW_DELIVERY, webhook_id, delivery_id)

    def replay_delivery(self, webhook_id: int, delivery_id: int) -> DeliveryBody:
        """Send a delivery again, with the same message id."""
        return self.ask(operations.REPLAY, webhook_id, delivery_id)

    def replay_failed_deliveries(self, webhook_id: int, since: datetime) -> int:
        """Send all failed deliveries of events since then again; return their number.

        `since` must have a time zone.
        """
        answer = self.ask(operations.REPLAY_FAILED, webhook_id, body=ReplayRequest(since))
        return answer["num_replayed"]
