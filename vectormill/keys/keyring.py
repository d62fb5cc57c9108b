"""Keyring: a cache of the keys that are not revoked, so that few requests wait for Postgres."""

import logging
import time
from collections.abc import Callable, Sequence
from hmac import compare_digest
from typing import Final

import anyio.to_thread
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from vectormill.coalescer import Coalescer
from vectormill.keys.api_key import hash_secret
from vectormill.keys.api_keys import CachedKey, load_keys, note_use

# A revocation takes effect within this time in every API process.
FRESH_SECONDS: Final = 3.0
# A new key is valid at once: for an unknown one the keys are read again, but not more often than this.
UNKNOWN_SECONDS: Final = 0.25
# After a failed read, Postgres is not queried for this long, lest waiting requests queue up behind each
# other.
PATIENCE_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


class Keyring:
    """A cache that reads all keys at most once in FRESH_SECONDS, or UNKNOWN_SECONDS, however many requests come."""

    def __init__(self, engine: Engine, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._reads: Coalescer[None, None, Sequence[CachedKey]] = Coalescer(
            self._read, max_waiting=max_waiting, max_running_of=lambda _: 1
        )
        self._read_at = float("-inf")
        self._failed_at = float("-inf")
        self._failure: SQLAlchemyError | None = None
        self._noted: set[int] = set()
        self.last_known: Sequence[CachedKey] = ()

    async def keys(self, *, is_unknown: bool = False) -> Sequence[CachedKey]:
        """Return all keys that are not revoked, including expired ones. Raise SQLAlchemyError.

        `is_unknown` says that the keys of a moment ago have not the one that a request brought.
        """
        if self._clock() < self._read_at + (UNKNOWN_SECONDS if is_unknown else FRESH_SECONDS):
            return self.last_known
        return await self._reads.ask(None, None)  # one read serves all requests that come meanwhile

    async def _read(self, _: None, askers: Sequence[None]) -> list[Sequence[CachedKey]]:
        if self._failure is not None and self._clock() < self._failed_at + PATIENCE_SECONDS:
            raise self._failure.with_traceback(None)  # the traceback would grow with every request
        began = self._clock()
        if began >= self._read_at + min(UNKNOWN_SECONDS, FRESH_SECONDS):
            try:
                self.last_known = await anyio.to_thread.run_sync(self._load)
            except SQLAlchemyError as error:
                self._failure, self._failed_at = error, self._clock()
                raise
            self._read_at, self._failure = began, None
            self._noted.clear()
        return [self.last_known] * len(askers)

    def _load(self) -> Sequence[CachedKey]:
        with self._engine.connect() as connection:
            return load_keys(connection)

    async def note_use(self, key: CachedKey) -> None:
        """Record that a key is used now, at most once an hour in each process."""
        if key.is_use_due and key.id not in self._noted:
            self._noted.add(key.id)
            await anyio.to_thread.run_sync(self._note_use, key)

    def _note_use(self, key: CachedKey) -> None:
        try:
            with self._engine.begin() as connection:
                note_use(connection, key.id)
        except SQLAlchemyError as error:  # a read-only Postgres can still serve requests
            logger.warning("Could not record the last use of key %s: %s", key.name, error)


def find_key(keys: Sequence[CachedKey], secret: str) -> CachedKey | None:
    """Return the valid key with this secret, or None.

    All keys are compared in constant time, against timing attacks.
    """
    wanted = hash_secret(secret)
    found = None
    for key in keys:
        if compare_digest(key.hash, wanted) and not key.is_expired:
            found = key
    return found
