"""Idempotency-Keys as they are kept: each belongs to the API key that brought it. Knows neither HTTP nor Postgres."""

from typing import Final

# A header cannot hold it, so nobody can bring the kept form of another's key.
SEPARATOR: Final = "\n"


def own_idempotency_key(key: str, api_key_id: int | None) -> str:
    """Return the kept form of a key, which no other API key can repeat; it is the key itself where none is needed."""
    return key if api_key_id is None else f"{api_key_id}{SEPARATOR}{key}"


def bare_idempotency_key(kept: str) -> str:
    """Return the key as the client sent it, which is how a former release, or an API without keys, keeps it."""
    return kept.rpartition(SEPARATOR)[2]
