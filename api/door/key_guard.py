"""KeyGuard: lets a request in when its key opens what it asks for. Reads no body."""

import logging
import math
import time
from typing import Final

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.door.scopes import CONSOLE, METRICS_PATH, find_scope
from api.limits.gates import Gate
from api.problems import Problem, describe_error, is_database_away
from vectormill.domain.errors import DatabaseUnavailable
from vectormill.keys.api_key import includes
from vectormill.keys.api_keys import KeptKey
from vectormill.keys.keyring import Keyring, find_key
from vectormill.settings import Settings

# The entry of a request's ASGI scope that holds the id of its API key; it is absent where no key was needed.
KEY_ID: Final = "vectormill.api_key_id"
CHALLENGE = 'Bearer realm="vectormill"'
# Where clients of other APIs put a key alone: that of Azure's OpenAI the first, tools for Anthropic's API the second.
KEY_HEADERS: Final = ("api-key", "x-api-key")

logger = logging.getLogger(__name__)


class KeyGuard:
    """ASGI middleware. `is_local`: only this machine can connect, so that without any key all may come in."""

    def __init__(self, app: ASGIApp, keyring: Keyring, *, is_local: bool, settings: Settings) -> None:
        self._app = app
        self._keyring = keyring
        self._is_local = is_local
        self._settings = settings
        self._metrics_are_open = settings.open_metrics
        self._gates: dict[int, Gate] = {}  # of keys with requests inside
        self._num_refused = 0
        self._logged_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = await self._find_key(scope)
            if isinstance(found, KeptKey):
                await self._let_in(found, scope, receive, send)
                return
            if found is not None:
                await found.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _let_in(self, key: KeptKey, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request as one of those that the key may have at once."""
        gate = self._gates.setdefault(
            key.id, Gate(self._settings, "max_requests_per_key", f"requests of the key {key.name}")
        )
        scope[KEY_ID] = key.id
        try:
            with gate.enter():
                await self._app(scope, receive, send)
        except Problem as problem:  # the application answers its own
            await problem.response(scope["path"])(scope, receive, send)
        finally:
            if not gate.inside:
                self._gates.pop(key.id, None)

    async def _find_key(self, scope: Scope) -> KeptKey | Problem | None:
        """Find the key with which the request comes in, or why it may not; None when it needs none."""
        method, path = scope["method"], scope["path"]
        needed = find_scope(method, path)
        if needed in (None, CONSOLE) or (path == METRICS_PATH and self._metrics_are_open):
            return None
        try:
            keys = await self._keyring.keys()
        except SQLAlchemyError as error:
            if not is_database_away(error):
                raise
            keys = self._keyring.last_known
            # The metrics of this process's own requests must be seen above all while Postgres is away.
            if path != METRICS_PATH or not (keys or self._is_local):
                logger.warning("Postgres did not tell the keys for %s %r: %s", method, path, error)
                return describe_error(DatabaseUnavailable())
        if not keys:
            return None if self._is_local else NO_KEY_EXISTS
        secrets = read_secrets(Headers(scope=scope))
        if len(secrets) > 1:
            return KEYS_DIFFER
        secret = next(iter(secrets), None)
        key = find_key(keys, secret) if secret is not None else None
        if key is None:
            self._note_refusal(scope)
            return KEY_UNKNOWN if secret is not None else KEY_MISSING
        await self._keyring.note_use(key)
        return key if includes(key.scope, needed) else scope_missing(key, needed)

    def _note_refusal(self, scope: Scope) -> None:
        """Log it, without what was brought; of many in a second one line, so that a flood fills no disk."""
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


def read_secrets(headers: Headers) -> set[str]:
    """Return the different secrets that a request brings, by whichever header."""
    bearers = map(read_bearer, headers.getlist("authorization"))
    alone = (value.strip() for name in KEY_HEADERS for value in headers.getlist(name))
    return {secret for secret in (*bearers, *alone) if secret}


def read_bearer(header: str) -> str | None:
    """The secret of `Authorization: Bearer SECRET` (RFC 6750); None when the header brings none."""
    scheme, _, secret = header.strip().partition(" ")
    return secret.strip() if scheme.lower() == "bearer" and secret.strip() else None


NO_KEY_EXISTS = Problem(
    403,
    "no-key-exists",
    "No API key is left, and without one this API serves its own machine alone: make one with "
    "`vectormill keys create NAME`.",
)
KEY_MISSING = Problem(
    401,
    "key-missing",
    "This API wants a key, as `Authorization: Bearer vmk_…`; the command line and the Python client take it from "
    "VECTORMILL_API_KEY, and `vectormill keys create NAME` makes one.",
    headers={"WWW-Authenticate": CHALLENGE},
)
# RFC 6750, 3.1, has this status for a token that is brought in more than one way.
KEYS_DIFFER = Problem(
    400,
    "keys-differ",
    "The request brings different keys, in Authorization, api-key or x-api-key; send the one that is meant.",
    headers={"WWW-Authenticate": f'{CHALLENGE}, error="invalid_request"'},
)
KEY_UNKNOWN = Problem(
    401,
    "key-unknown",
    "This key opens nothing: it is misspelt, revoked or expired; `vectormill keys list` tells, and "
    "`vectormill keys create NAME` makes another.",
    headers={"WWW-Authenticate": f'{CHALLENGE}, error="invalid_token"'},
)


def scope_missing(key: KeptKey, needed: str) -> Problem:
    return Problem(
        403,
        "scope-missing",
        f"This request needs a key of scope {needed}, and the key {key.name} has scope {key.scope}.",
        headers={"WWW-Authenticate": f'{CHALLENGE}, error="insufficient_scope", scope="{needed}"'},
    )
