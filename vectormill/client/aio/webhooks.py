"""Webhooks over HTTP."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import Json, given, make_key_header, make_path
from vectormill.client.shapes import DeliveryBody, NewWebhookBody, ReplayedBody, WebhookBody


class WebhookCalls(Transport):
    """Calls for webhooks, which are told of the ends of jobs and runs. All need a key with the scope webhooks."""

    async def create_webhook(
        self,
        url: str,
        *,
        events: Sequence[str] = (),
        description: str = "",
        idempotency_key: str | None = None,
    ) -> NewWebhookBody:
        """Told of these events, or of all. The answer has its `secret`, which is shown this once."""
        body = {"url": url, "events": list(events), "description": description}
        headers = make_key_header(idempotency_key)
        return await self.call(NewWebhookBody, "POST", "/v1/webhooks", json=body, headers=headers)

    def webhooks(self) -> AsyncIterator[WebhookBody]:
        """Yield every webhook, the oldest first, page by page."""
        return self.pages(WebhookBody, "/v1/webhooks", {})

    async def webhook(self, webhook_id: int) -> WebhookBody:
        return await self.call(WebhookBody, "GET", make_path("/v1/webhooks", str(webhook_id)))

    async def change_webhook(
        self,
        webhook_id: int,
        *,
        url: str | None = None,
        events: Sequence[str] | None = None,
        description: str | None = None,
        is_enabled: bool | None = None,
    ) -> WebhookBody:
        """Change a webhook; whatever is None stays. Enabling it again clears its failures."""
        body = {
            "url": url,
            "events": None if events is None else list(events),
            "description": description,
            "is_enabled": is_enabled,
        }
        return await self.call(
            WebhookBody, "PATCH", make_path("/v1/webhooks", str(webhook_id)), json=given(body)
        )

    async def rotate_webhook_secret(
        self, webhook_id: int, *, grace_seconds: float | None = None
    ) -> NewWebhookBody:
        """Another `secret`; for a while, a day unless said, messages are signed with the former one too."""
        path = make_path("/v1/webhooks", str(webhook_id), "rotate-secret")
        # Not repeated: each attempt makes one, and the secret before the last would be forgotten.
        return await self.call(
            NewWebhookBody, "POST", path, json=given({"grace_seconds": grace_seconds}), is_repeatable=False
        )

    async def test_webhook(self, webhook_id: int) -> DeliveryBody:
        """Send an event `webhook.test`; its delivery."""
        return await self.call(
            DeliveryBody, "POST", make_path("/v1/webhooks", str(webhook_id), "test"), is_repeatable=False
        )

    async def delete_webhook(self, webhook_id: int) -> None:
        """Delete a webhook with its deliveries."""
        await self.call(Json, "DELETE", make_path("/v1/webhooks", str(webhook_id)))

    def webhook_deliveries(self, webhook_id: int, *, state: str | None = None) -> AsyncIterator[DeliveryBody]:
        """Yield every event of it, the newest first, page by page; `state` is pending, delivered or failed."""
        return self.pages(
            DeliveryBody, make_path("/v1/webhooks", str(webhook_id), "deliveries"), {"state": state}
        )

    async def webhook_delivery(self, webhook_id: int, delivery_id: int) -> DeliveryBody:
        return await self.call(
            DeliveryBody, "GET", make_path("/v1/webhooks", str(webhook_id), "deliveries", str(delivery_id))
        )

    async def replay_delivery(self, webhook_id: int, delivery_id: int) -> DeliveryBody:
        """Send it once more, with the same message id."""
        path = make_path("/v1/webhooks", str(webhook_id), "deliveries", str(delivery_id), "replay")
        return await self.call(DeliveryBody, "POST", path)

    async def replay_failed_deliveries(self, webhook_id: int, since: datetime) -> int:
        """Send all once more that were given up, of events since then; how many. `since` knows its zone."""
        body = {"since": since.isoformat()}
        answer = await self.call(
            ReplayedBody, "POST", make_path("/v1/webhooks", str(webhook_id), "replay"), json=body
        )
        return answer["num_replayed"]
