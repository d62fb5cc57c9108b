"""Signature: the headers by which a receiver verifies that a message is authentic, complete and recent."""

from collections.abc import Sequence
from datetime import datetime

from standardwebhooks import Webhook


def make_headers(message_id: str, payload: str, secrets: Sequence[str], now: datetime) -> dict[str, str]:
    """Return a message's headers with one signature per secret, so that both work while a secret is rotated.

    `now` is in UTC; a receiver refuses messages older than five minutes.
    """
    signatures = [Webhook(secret).sign(message_id, now, payload) for secret in secrets]
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(signatures),
    }
