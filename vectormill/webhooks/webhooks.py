"""Webhooks in the database: created, found, changed and deleted, and their secrets rotated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Row, text

from vectormill.domain.errors import Conflict, TooManyWebhooks, WebhookNotFound
from vectormill.webhooks.webhook import MAX_WEBHOOKS, Webhook

_COLUMNS: Final = """
           id, url, description, events, is_enabled, disabled_reason, failing_since, former_secret_until,
           num_delivered, num_refused, num_failed, created_at, updated_at
"""
# Concurrent inserts may exceed the limit by one, which does no harm: it is there against thousands.
INSERT_WEBHOOK = text(f"""
    INSERT INTO vectormill.webhooks (url, description, events, secret)
    SELECT :url, :description, CAST(:events AS text[]), :secret
     WHERE (SELECT count(*) FROM vectormill.webhooks) < CAST(:max_webhooks AS bigint)
    RETURNING {_COLUMNS}
""")


def create_webhook(
    connection: Connection, url: str, description: str, events: Sequence[str], secret: str
) -> Webhook:
    """Create a webhook, which is notified of events from now on. Raise TooManyWebhooks."""
    values = {
        "url": url,
        "description": description,
        "events": list(events),
        "secret": secret,
        "max_webhooks": MAX_WEBHOOKS,
    }
    row = connection.execute(INSERT_WEBHOOK, values).one_or_none()
    if row is None:
        raise TooManyWebhooks(f"There are already {MAX_WEBHOOKS} webhooks, the maximum; delete one first.")
    return Webhook(**row._mapping)


FIND_WEBHOOK = text(f"""
    SELECT {_COLUMNS}
      FROM vectormill.webhooks WHERE id = :id
""")


def find_webhook(connection: Connection, webhook_id: int) -> Webhook:
    """Return the webhook with this id. Raise WebhookNotFound."""
    return _found(connection.execute(FIND_WEBHOOK, {"id": webhook_id}).one_or_none())


FIND_FIRST_SECRET = text("""
    SELECT secret FROM vectormill.webhooks WHERE id = :id AND former_secret_until IS NULL
""")


def find_first_secret(connection: Connection, webhook_id: int) -> str:
    """Return the secret with which the webhook was created. Raise Conflict if it was rotated since."""
    secret: str | None = connection.execute(FIND_FIRST_SECRET, {"id": webhook_id}).scalar_one_or_none()
    if secret is None:
        raise Conflict(
            "The secret of this webhook has been rotated since it was created; rotate it again to get a new one."
        )
    return secret


LIST_WEBHOOKS = text(f"""
    SELECT {_COLUMNS}
      FROM vectormill.webhooks
     WHERE id > coalesce(CAST(:after AS bigint), 0)
     ORDER BY id
     LIMIT CAST(:limit AS integer)
""")


def list_webhooks(connection: Connection, *, after: int | None = None, limit: int = 200) -> Sequence[Webhook]:
    """List webhooks, oldest first; `after` is the id of the last webhook of the previous page."""
    return [
        Webhook(**row._mapping) for row in connection.execute(LIST_WEBHOOKS, {"after": after, "limit": limit})
    ]


# Enabling a webhook again also forgets its earlier failures.
CHANGE_WEBHOOK = text(f"""
    UPDATE vectormill.webhooks
       SET url = coalesce(:url, url), description = coalesce(:description, description),
           events = coalesce(CAST(:events AS text[]), events),
           is_enabled = coalesce(CAST(:is_enabled AS boolean), is_enabled),
           disabled_reason = CASE WHEN CAST(:is_enabled AS boolean) THEN NULL
                                  WHEN NOT CAST(:is_enabled AS boolean) AND is_enabled THEN 'Disabled on request.'
                                  ELSE disabled_reason END,
           failing_since = CASE WHEN CAST(:is_enabled AS boolean) THEN NULL ELSE failing_since END,
           updated_at = now()
     WHERE id = :id
    RETURNING {_COLUMNS}
""")


def change_webhook(
    connection: Connection,
    webhook_id: int,
    *,
    url: str | None = None,
    description: str | None = None,
    events: Sequence[str] | None = None,
    is_enabled: bool | None = None,
) -> Webhook:
    """Change the fields of a webhook for which a value is given. Raise WebhookNotFound."""
    values = {
        "id": webhook_id,
        "url": url,
        "description": description,
        "events": None if events is None else list(events),
        "is_enabled": is_enabled,
    }
    return _found(connection.execute(CHANGE_WEBHOOK, values).one_or_none())


ROTATE_SECRET = text(f"""
    UPDATE vectormill.webhooks
       SET secret = :secret, former_secret = secret,
           former_secret_until = now() + make_interval(secs => CAST(:grace_seconds AS double precision)),
           updated_at = now()
     WHERE id = :id
    RETURNING {_COLUMNS}
""")


def rotate_secret(connection: Connection, webhook_id: int, secret: str, grace_seconds: float) -> Webhook:
    """Replace a webhook's secret. Raise WebhookNotFound.

    For `grace_seconds`, messages are signed with both secrets.
    """
    values = {"id": webhook_id, "secret": secret, "grace_seconds": grace_seconds}
    return _found(connection.execute(ROTATE_SECRET, values).one_or_none())


DELETE_WEBHOOK = text("DELETE FROM vectormill.webhooks WHERE id = :id RETURNING id")

# A delivery that a job's end inserts at this moment is left over; nobody finds it, and the pruner deletes it.
DELETE_DELIVERIES = text("DELETE FROM vectormill.webhook_deliveries WHERE webhook_id = :id")


def delete_webhook(connection: Connection, webhook_id: int) -> None:
    """Delete a webhook and its deliveries; nothing is sent to it any more. Raise WebhookNotFound."""
    if connection.execute(DELETE_WEBHOOK, {"id": webhook_id}).one_or_none() is None:
        raise WebhookNotFound
    connection.execute(DELETE_DELIVERIES, {"id": webhook_id})


# The oldest pending delivery of a webhook is the one with the smallest id, which an index finds.
COUNT_DELIVERIES = text("""
    SELECT webhook.id AS webhook_id, webhook.is_enabled, webhook.num_delivered, webhook.num_refused,
           webhook.num_failed,
           CAST(coalesce(extract(epoch FROM now() - oldest.created_at), 0) AS double precision) AS oldest_seconds
      FROM vectormill.webhooks AS webhook
      LEFT JOIN LATERAL (SELECT created_at FROM vectormill.webhook_deliveries
                          WHERE webhook_id = webhook.id AND state = 'pending'
                          ORDER BY id LIMIT 1) AS oldest ON true
     ORDER BY webhook.id
""")


@dataclass(frozen=True, slots=True)
class DeliveryCounts:
    """Counts of one webhook's delivered messages, failed attempts (`num_refused`) and failed messages.

    `oldest_seconds` is the age of the oldest pending message.
    """

    webhook_id: int
    is_enabled: bool
    num_delivered: int
    num_refused: int
    num_failed: int
    oldest_seconds: float


def count_deliveries(connection: Connection) -> Sequence[DeliveryCounts]:
    """Return the delivery counts of every webhook."""
    return [DeliveryCounts(**row._mapping) for row in connection.execute(COUNT_DELIVERIES)]


def _found(row: Row[tuple[object, ...]] | None) -> Webhook:
    if row is None:
        raise WebhookNotFound
    return Webhook(**row._mapping)
