"""API keys in the database: each secret's hash, and its scope; and their cache, so that few requests wait for Postgres.

The secrets themselves are not stored.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hmac import compare_digest
from typing import Any, Final

import anyio.to_thread
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from vectormill.addresses import is_loopback_host
from vectormill.coalescer import Coalescer
from vectormill.db.session import make_engine
from vectormill.domain.errors import ConfigurationError, Conflict, NotFound
from vectormill.keys.api_key import MAKE_SECRET, VALID, ApiKey, hash_secret

# Every API process caches all keys that are not revoked, and compares each with the key of a request.
MAX_KEYS = 1000
# A revocation takes effect within this time in every API process.
FRESH_SECONDS: Final = 3.0
# A new key is valid at once: for an unknown one the keys are read again, but not more often than this.
UNKNOWN_SECONDS: Final = 0.25
# After a failed read, Postgres is not queried for this long, lest waiting requests queue up behind each
# other.
PATIENCE_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)

COUNT_KEYS = text("SELECT count(*) FROM vectormill.api_keys WHERE revoked_at IS NULL")

INSERT_KEY = text("""
    INSERT INTO vectormill.api_keys (name, hash, scope, expires_at)
    VALUES (:name, CAST(:hash AS bytea), :scope, now() + CAST(:lifetime AS interval))
    ON CONFLICT DO NOTHING
    RETURNING name, scope, created_at, expires_at, revoked_at, last_used_at
""")

FIND_KEY_BY_HASH = text("""
    SELECT name, scope, created_at, expires_at, revoked_at, last_used_at
      FROM vectormill.api_keys WHERE hash = CAST(:hash AS bytea)
""")


def create_key(
    connection: Connection, name: str, secret: str, scope: str, lifetime: timedelta | None = None
) -> ApiKey:
    """Store a new key. Raise Conflict if the name or the secret is taken, or there are too many keys."""
    if connection.execute(COUNT_KEYS).scalar_one() >= MAX_KEYS:
        raise Conflict(f"There are already {MAX_KEYS} keys, the maximum; revoke those that nobody needs.")
    values = {"name": name, "hash": hash_secret(secret), "scope": scope, "lifetime": lifetime}
    row = connection.execute(INSERT_KEY, values).one_or_none()
    if row is None:
        raise Conflict(
            f"A key named {name!r} or with this secret already exists; revoke it first, or use another name."
        )
    return _key(row)


LOCK_KEYS = text("LOCK TABLE vectormill.api_keys IN SHARE ROW EXCLUSIVE MODE")


def keep_key(
    connection: Connection, name: str, secret: str, scope: str, lifetime: timedelta | None = None
) -> str:
    """Store the key of a deployment unless it is stored already, and return a sentence on what was done.

    Another key of this name is revoked. Raise ConfigurationError if the key was revoked or has expired: it does
    not become valid again.
    """
    connection.execute(LOCK_KEYS)  # of two deployments at once, one stores the key and the other finds it
    row = connection.execute(FIND_KEY_BY_HASH, {"hash": hash_secret(secret)}).one_or_none()
    if row is None:
        former = connection.execute(REVOKE_KEY, {"name": name}).one_or_none()
        create_key(connection, name, secret, scope, lifetime)
        end = " in place of its former value, which is revoked" if former is not None else ""
        return f"Stored the key {name} ({scope}){end}."
    known = _key(row)
    state = known.describe_state(datetime.now(UTC))
    if state != VALID:
        raise ConfigurationError(
            f"The key in VECTORMILL_API_KEY was {known.name} and is {state}: set another one, such as that of "
            f"`{MAKE_SECRET}`."
        )
    return f"The key is stored already as {known.name} ({known.scope})."


LIST_KEYS = text("""
    SELECT name, scope, created_at, expires_at, revoked_at, last_used_at
      FROM vectormill.api_keys ORDER BY created_at, id
""")


def list_keys(connection: Connection) -> list[ApiKey]:
    """Return all keys, oldest first, including revoked ones."""
    return [_key(row) for row in connection.execute(LIST_KEYS)]


REVOKE_KEY = text("""
    UPDATE vectormill.api_keys SET revoked_at = now() WHERE name = :name AND revoked_at IS NULL
    RETURNING name, scope, created_at, expires_at, revoked_at, last_used_at
""")


def revoke_key(connection: Connection, name: str) -> ApiKey:
    """Revoke a key permanently; its name can be used again. Raise NotFound."""
    row = connection.execute(REVOKE_KEY, {"name": name}).one_or_none()
    if row is None:
        raise NotFound(f"There is no active key named {name!r}; `vectormill keys list` lists all keys.")
    return _key(row)


@dataclass(frozen=True, slots=True)
class CachedKey:
    """A key as an API process caches it; `is_use_due` is True if no use was recorded within the last hour."""

    id: int
    name: str
    hash: bytes
    scope: str
    is_expired: bool
    is_use_due: bool


LOAD_KEYS = text("""
    SELECT id, name, hash, scope, coalesce(expires_at <= now(), false) AS is_expired,
           coalesce(last_used_at < now() - interval '1 hour', true) AS is_use_due
      FROM vectormill.api_keys WHERE revoked_at IS NULL
""")


def load_keys(connection: Connection) -> Sequence[CachedKey]:
    """Return every key that is not revoked.

    Expired keys are included, so that an API whose keys have all expired is closed, not open.
    """
    return [
        CachedKey(row.id, row.name, bytes(row.hash), row.scope, row.is_expired, row.is_use_due)
        for row in connection.execute(LOAD_KEYS)
    ]


NOTE_USE = text("UPDATE vectormill.api_keys SET last_used_at = now() WHERE id = :id")


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

        def write() -> None:
            try:
                with self._engine.begin() as connection:
                    connection.execute(NOTE_USE, {"id": key.id})
            except SQLAlchemyError as error:  # a read-only Postgres can still serve requests
                logger.warning("Could not record the last use of key %s: %s", key.name, error)

        if key.is_use_due and key.id not in self._noted:
            self._noted.add(key.id)
            await anyio.to_thread.run_sync(write)


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


def require_key_beyond_loopback(database_url: str, host: str, options: str = "") -> None:
    """Raise ConfigurationError if other machines can reach `host` but no valid key exists.

    They could do everything. `options` are what `vectormill keys create` needs to find this database. Raise
    SQLAlchemyError if Postgres fails.
    """
    if is_loopback_host(host):
        return
    engine = make_engine(database_url, application_name="vectormill door", pool_size=1)
    try:
        with engine.connect() as connection:
            has_key = any(not key.is_expired for key in load_keys(connection))
    except ProgrammingError as error:
        raise ConfigurationError(
            "The database has no table of API keys: run `vectormill migrate` first."
        ) from error
    finally:
        engine.dispose()
    if not has_key:
        raise ConfigurationError(
            f"Refusing to listen on {host} without an API key: other machines could use the API freely. Create a key "
            f"with `vectormill keys create NAME{options}`, or leave the host at 127.0.0.1."
        )


def _key(row: Row[Any]) -> ApiKey:
    return ApiKey(**row._mapping)
