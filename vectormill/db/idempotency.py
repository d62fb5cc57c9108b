"""Idempotency-Keys of requests that make a file, a push, a run or a webhook.

A row records what a key has made. It is written in the transaction that makes the thing, so both exist or
neither does. A key belongs to the API key that sent it. Jobs and batches store their keys in their own
tables.
"""

import hashlib
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, text

from vectormill.domain.errors import IdempotencyMismatch

# A repeated request waits here until the transaction of the first one has ended, and then reads what that has
# made. The update changes nothing, but without it an existing row would not be returned.
CLAIM_KEY = text("""
    INSERT INTO vectormill.idempotency_keys AS kept (operation, idempotency_key, content_hash)
    VALUES (:operation, :idempotency_key, :content_hash)
    ON CONFLICT (operation, idempotency_key) DO UPDATE SET content_hash = kept.content_hash
    RETURNING content_hash, made_id
""")

KEEP_MADE = text("""
    UPDATE vectormill.idempotency_keys SET made_id = :made_id
     WHERE operation = :operation AND idempotency_key = :idempotency_key
""")


def make_once(
    connection: Connection,
    operation: str,
    idempotency_key: str | None,
    content: bytes,
    make: Callable[[], str],
) -> str:
    """Call `make` once for each key, and return the id of what it made then or in an earlier request.

    Keys are separate for each operation. Raise IdempotencyMismatch if the key was used with other content.
    """
    if idempotency_key is None:
        return make()
    content_hash = hashlib.blake2b(content, digest_size=16).digest()
    claim = {"operation": operation, "idempotency_key": idempotency_key, "content_hash": content_hash}
    kept = connection.execute(CLAIM_KEY, claim).one()
    if bytes(kept.content_hash) != content_hash:
        raise IdempotencyMismatch
    made_id: str | None = kept.made_id
    if made_id is None:
        made_id = make()
        connection.execute(KEEP_MADE, {**claim, "made_id": made_id})
    return made_id


# One day is longer than any client retries.
DELETE_OLD_KEYS = text("""
    DELETE FROM vectormill.idempotency_keys WHERE created_at < now() - interval '1 day'
""")


def delete_old_keys(connection: Connection) -> None:
    """Delete the keys that are older than a day."""
    connection.execute(DELETE_OLD_KEYS)


# A header cannot contain this character, so no client can send the stored form of another client's key.
SEPARATOR: Final = "\n"


def own_idempotency_key(key: str, api_key_id: int | None) -> str:
    """Return the form in which a key is stored, prefixed with the id of its API key.

    Without an API key it is the key itself. No other API key can produce the same form.
    """
    return key if api_key_id is None else f"{api_key_id}{SEPARATOR}{key}"


def bare_idempotency_key(kept: str) -> str:
    """Return the key as the client sent it, which is also how an API without API keys stores it."""
    return kept.rpartition(SEPARATOR)[2]
