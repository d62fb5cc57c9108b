"""Webhooks in the database, and their deliveries: claimed for an attempt, recorded, listed, replayed and pruned."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Row, text

from vectormill.domain.errors import (
    Conflict,
    DeliveryNotFound,
    TooManyWebhooks,
    WebhookDisabled,
    WebhookNotFound,
)
from vectormill.domain.states import States
from vectormill.webhooks.webhook import (
    DELIVERED,
    FAILED,
    FAILING_SECONDS,
    GONE,
    MAX_WEBHOOKS,
    PENDING,
    SILENT_SECONDS,
    TEST_EVENT,
    Delivery,
    Posting,
    Reply,
    Webhook,
    describe_disabling,
    describe_failure,
    name_message,
)
from vectormill.work.work import Lease, Work, claim

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


FIND_WEBHOOK = text(f"SELECT {_COLUMNS} FROM vectormill.webhooks WHERE id = :id")


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


DELIVERIES: Final = Work(
    table="vectormill.webhook_deliveries",
    row="delivery",
    working=States((PENDING,)),
    attempt="num_attempts",
    available_at="due_at",
)

# A webhook has at most :most deliveries in progress, so that a slow receiver does not delay the others. A
# failing webhook has at most one, which comes after those of the others.
CLAIM_DELIVERIES = DELIVERIES.compose_claim(
    """
        SELECT due.id, webhook.url, webhook.secret,
               CASE WHEN webhook.former_secret_until > now() THEN webhook.former_secret END AS former_secret
          FROM vectormill.webhooks AS webhook
          LEFT JOIN unnest(CAST(:busy_ids AS bigint[]), CAST(:busy_counts AS integer[])) AS busy (id, num)
            ON busy.id = webhook.id
         CROSS JOIN LATERAL (
               SELECT delivery.id FROM vectormill.webhook_deliveries AS delivery
                WHERE delivery.webhook_id = webhook.id AND {claimable}
                ORDER BY delivery.due_at
                LIMIT greatest(0, CASE WHEN webhook.failing_since IS NULL THEN CAST(:most AS integer) ELSE 1 END
                                  - coalesce(busy.num, 0))
                {lock}) AS due
         WHERE webhook.is_enabled
         ORDER BY webhook.failing_since NULLS FIRST, due.id
         LIMIT CAST(:room AS integer)
    """,
    sets="attempted_at = now()",
    returning="""
        delivery.webhook_id, delivery.event_id, delivery.payload, candidate.url, candidate.secret,
        candidate.former_secret
    """,
)


def claim_deliveries(
    connection: Connection, busy: Mapping[int, int], *, owner: str, most: int, room: int, lease_seconds: float
) -> list[tuple[Lease, Posting]]:
    """Claim up to `room` due deliveries.

    `busy` counts the deliveries in progress by webhook id; together with these, a webhook gets at most
    `most`.
    """
    values = {"busy_ids": list(busy.keys()), "busy_counts": list(busy.values()), "most": most, "room": room}
    claimed = claim(
        connection, DELIVERIES, CLAIM_DELIVERIES, owner=owner, lease_seconds=lease_seconds, **values
    )
    postings = []
    for lease, row in claimed:
        secrets = [secret for secret in (row.secret, row.former_secret) if secret is not None]
        posting = Posting(row.webhook_id, name_message(row.event_id), row.payload, row.url, secrets)
        postings.append((lease, posting))
    return postings


RECORD_REPLY = DELIVERIES.compose_release("""
    state = :state, status_code = :status_code, error = :error,
    due_at = CASE WHEN CAST(:state AS text) = 'pending'
                  THEN now() + make_interval(secs => CAST(:pause_seconds AS double precision)) END,
    ended_at = CASE WHEN CAST(:state AS text) <> 'pending' THEN now() END
""")

NOTE_SUCCESS = text("""
    UPDATE vectormill.webhooks SET num_delivered = num_delivered + 1, failing_since = NULL WHERE id = :webhook_id
""")

# After a long time without a failure, the next one starts a new series: nothing was sent meanwhile that could
# have failed.
NOTE_FAILURE = text("""
    UPDATE vectormill.webhooks
       SET num_refused = num_refused + 1, num_failed = num_failed + CAST(:num_failed AS bigint),
           failing_since = CASE WHEN former.is_recent THEN coalesce(failing_since, now()) ELSE now() END,
           last_failed_at = now(),
           is_enabled = is_enabled AND NOT (
               CAST(:is_gone AS boolean)
               OR (former.is_recent
                   AND failing_since < now() - make_interval(secs => CAST(:failing_seconds AS double precision))))
      FROM (SELECT coalesce(coalesce(last_failed_at, failing_since)
                            > now() - make_interval(secs => CAST(:silent_seconds AS double precision)), false)
                   AS is_recent
              FROM vectormill.webhooks WHERE id = :webhook_id) AS former
     WHERE id = :webhook_id
    RETURNING is_enabled, disabled_reason
""")

DISABLE_WEBHOOK = text("""
    UPDATE vectormill.webhooks
       SET disabled_reason = :reason, num_failed = num_failed + CAST(:num_failed AS bigint), updated_at = now()
     WHERE id = :webhook_id
""")

# A user who enables the webhook again can replay these deliveries.
FAIL_PENDING = DELIVERIES.compose_revocation(
    "state = 'failed', error = :error, due_at = NULL, ended_at = now()",
    where="webhook_id = :webhook_id AND {open}",
)


def record_reply(
    connection: Connection, lease: Lease, posting: Posting, reply: Reply, pause_seconds: float | None
) -> bool:
    """Record the reply to an attempt; return True if the webhook was disabled because of it.

    A failed delivery is tried again after `pause_seconds`; if that is None, the delivery ends as failed.
    Raise LeaseLost if another process has claimed the delivery meanwhile.
    """
    state = DELIVERED if reply.is_success else FAILED if pause_seconds is None else PENDING
    lease.release(
        connection,
        RECORD_REPLY,
        state=state,
        status_code=reply.status_code,
        error=describe_failure(reply),
        pause_seconds=pause_seconds or 0.0,
    )
    if reply.is_success:
        connection.execute(NOTE_SUCCESS, {"webhook_id": posting.webhook_id})
        return False
    values = {
        "webhook_id": posting.webhook_id,
        "num_failed": int(state == FAILED),
        "is_gone": reply.status_code == GONE,
        "failing_seconds": FAILING_SECONDS,
        "silent_seconds": SILENT_SECONDS,
    }
    webhook = connection.execute(NOTE_FAILURE, values).one_or_none()
    if webhook is None or webhook.is_enabled or webhook.disabled_reason is not None:
        return False
    reason = describe_disabling(reply)
    fail_pending(connection, posting.webhook_id, f"The webhook was disabled: {reason}", reason)
    return True


def fail_pending(connection: Connection, webhook_id: int, error: str, reason: str) -> None:
    """End the pending deliveries of a disabled webhook as failed with `error`.

    `reason` is stored as the reason why the webhook is disabled.
    """
    ended = connection.execute(FAIL_PENDING, {"webhook_id": webhook_id, "error": error}).all()
    values = {"webhook_id": webhook_id, "reason": reason, "num_failed": len(ended)}
    connection.execute(DISABLE_WEBHOOK, values)


_SELECT: Final = """
    SELECT id, webhook_id, event_id, event_type, payload, state, num_attempts, status_code, error, due_at,
           attempted_at, ended_at, created_at
      FROM vectormill.webhook_deliveries
     WHERE webhook_id = :webhook_id
"""
_BEFORE: Final = """
       AND id < coalesce(CAST(:before AS bigint), 9223372036854775807) ORDER BY id DESC LIMIT CAST(:limit AS integer)
"""
FIND_DELIVERY = text(f"{_SELECT} AND id = :id")
LIST_DELIVERIES = text(f"{_SELECT} {_BEFORE}")
LIST_DELIVERIES_IN_STATE = text(f"{_SELECT} AND state = :state {_BEFORE}")


def find_delivery(connection: Connection, webhook_id: int, delivery_id: int) -> Delivery:
    """Return a delivery of a webhook. Raise DeliveryNotFound."""
    row = connection.execute(FIND_DELIVERY, {"id": delivery_id, "webhook_id": webhook_id}).one_or_none()
    if row is None:
        raise DeliveryNotFound
    return Delivery(**row._mapping)


def list_deliveries(
    connection: Connection,
    webhook_id: int,
    *,
    state: str | None = None,
    before: int | None = None,
    limit: int = 50,
) -> Sequence[Delivery]:
    """List a webhook's deliveries, newest first.

    `before` is the id of the last delivery of the previous page.
    """
    statement = LIST_DELIVERIES if state is None else LIST_DELIVERIES_IN_STATE
    values = {"webhook_id": webhook_id, "state": state, "before": before, "limit": limit}
    return [Delivery(**row._mapping) for row in connection.execute(statement, values)]


_ANEW: Final = """
    state = 'pending', num_attempts = 0, error = NULL, status_code = NULL, due_at = now(), ended_at = NULL
"""
REPLAY_DELIVERY = DELIVERIES.compose_revocation(_ANEW, where="id = :id AND webhook_id = :webhook_id")
REPLAY_FAILED = DELIVERIES.compose_revocation(
    _ANEW, where="webhook_id = :webhook_id AND state = 'failed' AND created_at >= :since"
)


def replay_delivery(connection: Connection, webhook_id: int, delivery_id: int) -> Delivery:
    """Send a message once more with the same message id, whatever the state of its delivery.

    Raise WebhookNotFound, WebhookDisabled and DeliveryNotFound.
    """
    _lock_enabled(connection, webhook_id)
    connection.execute(REPLAY_DELIVERY, {"id": delivery_id, "webhook_id": webhook_id})
    return find_delivery(connection, webhook_id, delivery_id)


def replay_failed(connection: Connection, webhook_id: int, since: datetime) -> int:
    """Send all failed messages created since `since` once more; return their number.

    Raise WebhookNotFound and WebhookDisabled.
    """
    _lock_enabled(connection, webhook_id)
    return len(connection.execute(REPLAY_FAILED, {"webhook_id": webhook_id, "since": since}).all())


INSERT_TEST = text("""
    INSERT INTO vectormill.webhook_deliveries (webhook_id, event_type, payload)
    VALUES (:webhook_id, :event_type, :payload)
    RETURNING id
""")


def post_test(connection: Connection, webhook_id: int, now: datetime) -> Delivery:
    """Queue a test event for a webhook and return its delivery. Raise WebhookNotFound and WebhookDisabled."""
    _lock_enabled(connection, webhook_id)
    event = {"type": TEST_EVENT, "timestamp": now.isoformat(), "data": {"webhook_id": webhook_id}}
    values = {"webhook_id": webhook_id, "event_type": TEST_EVENT, "payload": json.dumps(event)}
    return find_delivery(connection, webhook_id, connection.execute(INSERT_TEST, values).scalar_one())


# FOR SHARE keeps the webhook from being disabled until the transaction ends.
LOCK_WEBHOOK = text("SELECT is_enabled, disabled_reason FROM vectormill.webhooks WHERE id = :id FOR SHARE")


def _lock_enabled(connection: Connection, webhook_id: int) -> None:
    row = connection.execute(LOCK_WEBHOOK, {"id": webhook_id}).one_or_none()
    if row is None:
        raise WebhookNotFound
    if not row.is_enabled:
        raise WebhookDisabled(
            f"The webhook is disabled; enable it first. {row.disabled_reason or ''}".strip()
        )


# What is pending is kept for its webhook, unless that is deleted, or disabled for long.
PRUNE_DELIVERIES = text("""
    DELETE FROM vectormill.webhook_deliveries
     WHERE id IN (SELECT id FROM vectormill.webhook_deliveries
                   WHERE created_at < now() - make_interval(secs => CAST(:seconds AS double precision))
                     AND (state <> 'pending'
                          OR created_at < now() - interval '10 days'
                             AND NOT EXISTS (SELECT 1 FROM vectormill.webhooks AS webhook
                                              WHERE webhook.id = webhook_id AND is_enabled))
                   ORDER BY created_at
                   LIMIT CAST(:limit AS integer)
                     FOR UPDATE SKIP LOCKED)
""")


def prune_deliveries(connection: Connection, retention_seconds: float, limit: int) -> int:
    """Delete up to `limit` deliveries older than `retention_seconds`; return their number.

    Pending deliveries are deleted only after 10 days, and only if their webhook is deleted or disabled.
    """
    values = {"seconds": retention_seconds, "limit": limit}
    return connection.execute(PRUNE_DELIVERIES, values).rowcount
