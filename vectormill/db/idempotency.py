"""Idempotency-Keys of requests that make a file, a push, a run or a webhook; jobs and batches keep theirs with them.

One row says what a key has made. It is written in the transaction that makes the thing, so both are there or neither.
A key belongs to the API key that brought it.
"""

import hashlib
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, text

from vectormill.domain.errors import IdempotencyMismatch

# A repetition waits here until the transaction that makes the first has ended, and then reads what it has made. The
# update changes nothing: without it a row that is there already would not be returned.
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
    """Return the id of what `make` makes, or of what an earlier request with this key and content has made.

    Keys of two operations are two. Raise IdempotencyMismatch for a key that came with other content.
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


# Longer than any client tries again.
DELETE_OLD_KEYS = text("""
    DELETE FROM vectormill.idempotency_keys WHERE created_at < now() - interval '1 day'
""")


def delete_old_keys(connection: Connection) -> None:
    """Free the keys that are older than a day."""
    connection.execute(DELETE_OLD_KEYS)


# A header cannot hold it, so nobody can bring the kept form of another's key.
SEPARATOR: Final = "\n"


def own_idempotency_key(key: str, api_key_id: int | None) -> str:
    """Return the kept form of a key, which no other API key can repeat; it is the key itself where none is needed."""
    return key if api_key_id is None else f"{api_key_id}{SEPARATOR}{key}"


def bare_idempotency_key(kept: str) -> str:
    """Return the key as the client sent it, which is how an API without keys keeps it."""
    return kept.rpartition(SEPARATOR)[2]
