# Made of the same file in `aio` by `python -m tests.architecture.derived`: change that one.
"""Webhooks over HTTP."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from vectormill.client.requests import Json, given, make_key_header, make_path
from vectormill.client.shapes import DeliveryBody, NewWebhookBody, ReplayedBody, WebhookBody
from vectormill.client.sync.transport import Transport


class WebhookCalls(Transport):
    """Calls for webhooks, which are told of the ends of jobs and runs. All need a key with the scope webhooks."""

    def create_webhook(
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
        return self.call(NewWebhookBody, "POST", "/v1/webhooks", json=body, headers=headers)

    def webhooks(self) -> Iterator[WebhookBody]:
        """Yield every webhook, the oldest first, page by page."""
        return self.pages(WebhookBody, "/v1/webhooks", {})

    def webhook(self, webhook_id: int) -> WebhookBody:
        return self.call(WebhookBody, "GET", make_path("/v1/webhooks", str(webhook_id)))

    def change_webhook(
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
        return self.call(WebhookBody, "PATCH", make_path("/v1/webhooks", str(webhook_id)), json=given(body))

    def rotate_webhook_secret(self, webhook_id: int, *, grace_seconds: float | None = None) -> NewWebhookBody:
        """Another `secret`; for a while, a day unless said, messages are signed with the former one too."""
        path = make_path("/v1/webhooks", str(webhook_id), "rotate-secret")
        # Not repeated: each attempt makes one, and the secret before the last would be forgotten.
        return self.call(
            NewWebhookBody, "POST", path, json=given({"grace_seconds": grace_seconds}), is_repeatable=False
        )

    def test_webhook(self, webhook_id: int) -> DeliveryBody:
        """Send an event `webhook.test`; its delivery."""
        return self.call(
            DeliveryBody, "POST", make_path("/v1/webhooks", str(webhook_id), "test"), is_repeatable=False
        )

    def delete_webhook(self, webhook_id: int) -> None:
        """Delete a webhook with its deliveries."""
        self.call(Json, "DELETE", make_path("/v1/webhooks", str(webhook_id)))

    def webhook_deliveries(self, webhook_id: int, *, state: str | None = None) -> Iterator[DeliveryBody]:
        """Yield every event of it, the newest first, page by page; `state` is pending, delivered or failed."""
        return self.pages(
            DeliveryBody, make_path("/v1/webhooks", str(webhook_id), "deliveries"), {"state": state}
        )

    def webhook_delivery(self, webhook_id: int, delivery_id: int) -> DeliveryBody:
        return self.call(
            DeliveryBody, "GET", make_path("/v1/webhooks", str(webhook_id), "deliveries", str(delivery_id))
        )

    def replay_delivery(self, webhook_id: int, delivery_id: int) -> DeliveryBody:
        """Send it once more, with the same message id."""
        path = make_path("/v1/webhooks", str(webhook_id), "deliveries", str(delivery_id), "replay")
        return self.call(DeliveryBody, "POST", path)

    def replay_failed_deliveries(self, webhook_id: int, since: datetime) -> int:
        """Send all once more that were given up, of events since then; how many. `since` knows its zone."""
        body = {"since": since.isoformat()}
        answer = self.call(
            ReplayedBody, "POST", make_path("/v1/webhooks", str(webhook_id), "replay"), json=body
        )
        return answer["num_replayed"]
