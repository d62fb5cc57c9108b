"""Webhooks as rows: made, found, changed, their secret rotated, deleted. What is sent to them: deliveries.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Row, text

from vectormill.domain.errors import Conflict, TooManyWebhooks, WebhookNotFound
from vectormill.webhooks.webhook import MAX_WEBHOOKS, Webhook

# Two that are made at once may go one beyond the limit, which is there against thousands.
INSERT_WEBHOOK = text("""
    INSERT INTO vectormill.webhooks (url, description, events, secret)
    SELECT :url, :description, CAST(:events AS text[]), :secret
     WHERE (SELECT count(*) FROM vectormill.webhooks) < CAST(:max_webhooks AS bigint)
    RETURNING id, url, description, events, is_enabled, disabled_reason, failing_since, former_secret_until,
              num_delivered, num_refused, num_failed, created_at, updated_at
""")


def create_webhook(
    connection: Connection, url: str, description: str, events: Sequence[str], secret: str
) -> Webhook:
    """Whatever ends from now on is told to it. Raises TooManyWebhooks."""
    values = {
        "url": url,
        "description": description,
        "events": list(events),
        "secret": secret,
        "max_webhooks": MAX_WEBHOOKS,
    }
    row = connection.execute(INSERT_WEBHOOK, values).one_or_none()
    if row is None:
        raise TooManyWebhooks(f"There are {MAX_WEBHOOKS} webhooks already; delete one first.")
    return _webhook(row)


FIND_WEBHOOK = text("""
    SELECT id, url, description, events, is_enabled, disabled_reason, failing_since, former_secret_until,
           num_delivered, num_refused, num_failed, created_at, updated_at
      FROM vectormill.webhooks WHERE id = :id
""")


def find_webhook(connection: Connection, webhook_id: int) -> Webhook:
    """Raises WebhookNotFound."""
    return _found(connection.execute(FIND_WEBHOOK, {"id": webhook_id}).one_or_none())


FIND_FIRST_SECRET = text("""
    SELECT secret FROM vectormill.webhooks WHERE id = :id AND former_secret_until IS NULL
""")


def find_first_secret(connection: Connection, webhook_id: int) -> str:
    """Return the secret that the webhook was made with. Raises Conflict when it was rotated since."""
    secret: str | None = connection.execute(FIND_FIRST_SECRET, {"id": webhook_id}).scalar_one_or_none()
    if secret is None:
        raise Conflict(
            "The secret of this webhook was rotated since it was made; rotate it again to be shown one."
        )
    return secret


LIST_WEBHOOKS = text("""
    SELECT id, url, description, events, is_enabled, disabled_reason, failing_since, former_secret_until,
           num_delivered, num_refused, num_failed, created_at, updated_at
      FROM vectormill.webhooks
     WHERE id > coalesce(CAST(:after AS bigint), 0)
     ORDER BY id
     LIMIT CAST(:limit AS integer)
""")


def list_webhooks(connection: Connection, *, after: int | None = None, limit: int = 200) -> Sequence[Webhook]:
    """The oldest first; `after` is the id of the last one that is known already."""
    return [_webhook(row) for row in connection.execute(LIST_WEBHOOKS, {"after": after, "limit": limit})]


# Enabled again, it has a clean record: a failure of before counts for nothing.
CHANGE_WEBHOOK = text("""
    UPDATE vectormill.webhooks
       SET url = coalesce(:url, url), description = coalesce(:description, description),
           events = coalesce(CAST(:events AS text[]), events),
           is_enabled = coalesce(CAST(:is_enabled AS boolean), is_enabled),
           disabled_reason = CASE WHEN CAST(:is_enabled AS boolean) THEN NULL
                                  WHEN NOT CAST(:is_enabled AS boolean) AND is_enabled THEN 'Somebody disabled it.'
                                  ELSE disabled_reason END,
           failing_since = CASE WHEN CAST(:is_enabled AS boolean) THEN NULL ELSE failing_since END,
           updated_at = now()
     WHERE id = :id
    RETURNING id, url, description, events, is_enabled, disabled_reason, failing_since, former_secret_until,
              num_delivered, num_refused, num_failed, created_at, updated_at
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
    """Change a webhook; None leaves a field. Raise WebhookNotFound."""
    values = {
        "id": webhook_id,
        "url": url,
        "description": description,
        "events": None if events is None else list(events),
        "is_enabled": is_enabled,
    }
    return _found(connection.execute(CHANGE_WEBHOOK, values).one_or_none())


ROTATE_SECRET = text("""
    UPDATE vectormill.webhooks
       SET secret = :secret, former_secret = secret,
           former_secret_until = now() + make_interval(secs => CAST(:grace_seconds AS double precision)),
           updated_at = now()
     WHERE id = :id
    RETURNING id, url, description, events, is_enabled, disabled_reason, failing_since, former_secret_until,
              num_delivered, num_refused, num_failed, created_at, updated_at
""")


def rotate_secret(connection: Connection, webhook_id: int, secret: str, grace_seconds: float) -> Webhook:
    """Messages are signed with both secrets for so long. Raises WebhookNotFound."""
    values = {"id": webhook_id, "secret": secret, "grace_seconds": grace_seconds}
    return _found(connection.execute(ROTATE_SECRET, values).one_or_none())


DELETE_WEBHOOK = text("DELETE FROM vectormill.webhooks WHERE id = :id RETURNING id")

# One that a job's end adds this very moment is left, found by nobody, and pruned.
DELETE_DELIVERIES = text("DELETE FROM vectormill.webhook_deliveries WHERE webhook_id = :id")


def delete_webhook(connection: Connection, webhook_id: int) -> None:
    """With its deliveries; nothing is sent to it any more. Raises WebhookNotFound."""
    if connection.execute(DELETE_WEBHOOK, {"id": webhook_id}).one_or_none() is None:
        raise WebhookNotFound
    connection.execute(DELETE_DELIVERIES, {"id": webhook_id})


# The oldest by an index: of a webhook's pending deliveries the one with the smallest id.
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
    """Of one webhook: messages that were taken, attempts that failed, messages that were given up, and how long the
    oldest that was neither has waited."""

    webhook_id: int
    is_enabled: bool
    num_delivered: int
    num_refused: int
    num_failed: int
    oldest_seconds: float


def count_deliveries(connection: Connection) -> Sequence[DeliveryCounts]:
    return [DeliveryCounts(**row._mapping) for row in connection.execute(COUNT_DELIVERIES)]


def _webhook(row: Row[tuple[object, ...]]) -> Webhook:
    return Webhook(**row._mapping)


def _found(row: Row[tuple[object, ...]] | None) -> Webhook:
    if row is None:
        raise WebhookNotFound
    return _webhook(row)
