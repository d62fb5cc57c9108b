"""KeyGuard: admits requests whose API key has the scope that they need. Reads no body."""

import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from api.door.machine import MachineUsers
from api.door.scopes import CONSOLE, METRICS_PATH, find_scope
from api.limits.gates import Gate
from api.problems import Problem, describe_error, is_database_away
from vectormill.domain.errors import DatabaseUnavailable
from vectormill.keys.api_key import includes
from vectormill.keys.api_keys import CachedKey, Keyring, find_key
from vectormill.keys.own_key import OWN_KEY
from vectormill.settings import Settings

# The entry of a request's ASGI scope that holds its API key; it is absent where no key was needed.
KEY: Final = "vectormill.api_key"
CHALLENGE = 'Bearer realm="vectormill"'
# Headers in which other APIs' clients send a bare key: Azure's OpenAI the first, tools for Anthropic's API
# the second.
KEY_HEADERS: Final = ("api-key", "x-api-key")

logger = logging.getLogger(__name__)


class KeyGuard:
    """A guard that admits requests by their API keys; while no key exists, those that the machine admits."""

    def __init__(self, keyring: Keyring, machine: MachineUsers, settings: Settings) -> None:
        self._keyring = keyring
        self._machine = machine
        self._settings = settings
        self._gates: dict[int, Gate] = {}  # by key id, for keys that have requests in progress
        self._num_refused = 0
        self._logged_at = -math.inf

    @asynccontextmanager
    async def admit(self, scope: Scope) -> AsyncIterator[None]:
        """Admit a request for the duration of the block.

        Raise Problem if its key lacks the needed scope, or has as many requests in progress as it may have.
        """
        key = await self._find_key(scope)
        if key is None:
            yield
            return
        gate = self._gates.setdefault(
            key.id, Gate(self._settings, "max_requests_per_key", f"requests with the key {key.name}")
        )
        scope[KEY] = key
        try:
            with gate.enter():
                yield
        finally:
            if not gate.inside:
                self._gates.pop(key.id, None)

    async def _find_key(self, scope: Scope) -> CachedKey | None:
        """Return the key of the request; None if it needs none.

        Raise Problem if the key is missing, unknown or lacks the needed scope.
        """
        method, path = scope["method"], scope["path"]
        needed = find_scope(method, path)
        if needed in (None, CONSOLE) or (path == METRICS_PATH and self._settings.open_metrics):
            return None
        keys = await find_keys(self._keyring, self._machine, scope)
        if keys is None:
            return None
        secrets = read_secrets(Headers(scope=scope))
        if len(secrets) > 1:
            raise KEYS_DIFFER
        secret = next(iter(secrets), None)
        key = find_key(keys, secret) if secret is not None else None
        if key is None and secret is not None:
            with contextlib.suppress(SQLAlchemyError):
                key = find_key(await self._keyring.keys(is_unknown=True), secret)
        if key is None:
            self._note_refusal(scope)
            if keys is self._machine.keys:
                raise self._machine.describe_refusal(scope)
            raise KEY_UNKNOWN if secret is not None else KEY_MISSING
        if key.id == OWN_KEY:
            return None
        await self._keyring.note_use(key)
        if not includes(key.scope, needed):
            raise scope_missing(key, needed)
        return key

    def _note_refusal(self, scope: Scope) -> None:
        """Log that a request was refused, without its secret.

        At most one line is logged per second, so that a flood of requests does not fill the disk.
        """
        self._num_refused += 1
        if time.monotonic() - self._logged_at < 1:
            return
        client = (scope.get("client") or ("an unknown address",))[0]
        logger.warning(
            "%d requests without a valid key were refused, the last from %s: %s %r",
            self._num_refused,
            client,
            scope["method"],
            scope["path"][:200],
        )
        self._num_refused, self._logged_at = 0, time.monotonic()


async def find_keys(keyring: Keyring, machine: MachineUsers, scope: Scope) -> Sequence[CachedKey] | None:
    """Return the keys of which a request needs one; None if it needs none. Raise Problem if they cannot be read."""
    try:
        keys = await keyring.keys()
    except SQLAlchemyError as error:
        if not is_database_away(error):
            raise
        keys = keyring.last_known
        # Metrics matter most while Postgres is unavailable, so the keys that were read last decide about them.
        if scope["path"] != METRICS_PATH or not (keys or machine.is_local):
            logger.warning(
                "Cannot read the API keys from Postgres for %s %r: %s", scope["method"], scope["path"], error
            )
            raise describe_error(DatabaseUnavailable()) from error
    if not keys and machine.admits(scope):
        return None
    if not keys and not machine.is_local:
        raise NO_KEY_EXISTS
    return keys or machine.keys


def read_secrets(headers: Headers) -> set[str]:
    """Return the distinct secrets in any of the headers for keys; one is `Authorization: Bearer SECRET` (RFC 6750)."""
    secrets = {value.strip() for name in KEY_HEADERS for value in headers.getlist(name)}
    for value in headers.getlist("authorization"):
        scheme, _, secret = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            secrets.add(secret.strip())
    return secrets - {""}


NO_KEY_EXISTS = Problem(
    403,
    "no-key-exists",
    "There are no API keys left, and without one this API serves only its own machine. Create one with "
    "`vectormill keys create NAME`.",
)
KEY_MISSING = Problem(
    401,
    "key-missing",
    "This API requires a key in the header `Authorization: Bearer vmk_…`. The command line and the "
    "Python client read it from VECTORMILL_API_KEY; `vectormill keys create NAME` creates one.",
    headers={"WWW-Authenticate": CHALLENGE},
)
# RFC 6750, section 3.1, gives this status to a token that is sent in more than one way.
KEYS_DIFFER = Problem(
    400,
    "keys-differ",
    "The request has different keys in Authorization, api-key or x-api-key; send only one.",
    headers={"WWW-Authenticate": f'{CHALLENGE}, error="invalid_request"'},
)
KEY_UNKNOWN = Problem(
    401,
    "key-unknown",
    "Unknown API key: it is mistyped, revoked or expired. `vectormill keys list` lists all keys, and "
    "`vectormill keys create NAME` creates a new one.",
    headers={"WWW-Authenticate": f'{CHALLENGE}, error="invalid_token"'},
)


def find_key_id(request: Request) -> int | None:
    """Return the id of the request's API key; None if no key was needed."""
    key: CachedKey | None = request.scope.get(KEY)
    return None if key is None else key.id


def may(request: Request, needed: str) -> bool:
    """Return whether the request's API key includes a scope. Where no key was needed everything is allowed."""
    key: CachedKey | None = request.scope.get(KEY)
    return key is None or includes(key.scope, needed)


def check_scope(request: Request, needed: str) -> None:
    """Raise Problem if a body asks for what its API key does not include."""
    if not may(request, needed):
        raise scope_missing(request.scope[KEY], needed)


def scope_missing(key: CachedKey, needed: str) -> Problem:
    return Problem(
        403,
        "scope-missing",
        f"This request needs a key with scope {needed}, but the key {key.name} has scope {key.scope}.",
        headers={"WWW-Authenticate": f'{CHALLENGE}, error="insufficient_scope", scope="{needed}"'},
    )
