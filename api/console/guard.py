"""ConsoleGuard: authenticates the console's visitors, checks CSRF tokens, and adds security headers.

A session gives access to pages and their forms, and never to the HTTP API: a browser sends its cookie with
any request that another site's page triggers. So an unsafe request with a cookie needs a CSRF token as well;
one with a bearer key needs none.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import secrets
import struct
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import quote

from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.console.console import ROOT, STATIC_PREFIX, Console, Visitor
from api.door.admission import LOGIN
from api.door.keys import KEY_HEADERS, find_keys, scope_missing
from api.door.machine import MachineUsers
from api.door.scopes import SAFE_METHODS
from api.problems import MEDIA_TYPE, Problem
from vectormill.keys.api_key import ADMIN, READ, WRITE, hash_secret, includes
from vectormill.keys.api_keys import CachedKey, Keyring

HOME: Final = "/console/jobs"
LOGOUT: Final = "/console/logout"
REFERENCE: Final = "/console/docs"
CSRF_HEADER: Final = "x-csrf-token"

# Pages load, execute and submit only content of our own. Pico and Swagger embed pictures as data: URLs in
# their CSS.
POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

FORGED = Problem(
    403,
    "csrf-token-missing",
    "The CSRF token is missing or wrong. Reload the page and try again.",
)


class ConsoleGuard:
    """Middleware for requests of `is_for_people`. While no API key exists, those that the machine admits need none."""

    def __init__(
        self,
        app: ASGIApp,
        console: Console,
        keyring: Keyring,
        machine: MachineUsers,
        *,
        hsts_seconds: int = 0,
    ) -> None:
        self._app = app
        self._console = console
        self._keyring = keyring
        self._machine = machine
        self._hsts_seconds = hsts_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        cookies = read_cookies(headers)
        # The CSRF tokens of a browser without a session are derived from it.
        visit = cookies.get(VISIT_COOKIE) or secrets.token_urlsafe(24)
        scope.setdefault("state", {})["visitor"] = None
        cookie = None
        if VISIT_COOKIE not in cookies and not scope["path"].startswith(STATIC_PREFIX):
            cookie = write_cookie(VISIT_COOKIE, visit, is_secure=scope["scheme"] == "https")
        send = self._sending_pages(scope, headers, send, cookie)
        answer = await self._find_answer(scope, headers, cookies, visit)
        await (answer or self._app)(scope, receive, send)

    async def _find_answer(
        self, scope: Scope, headers: Headers, cookies: dict[str, str], visit: str
    ) -> Response | None:
        """Return the redirect or error to send instead of the page; None when the page may be served."""
        method, path = scope["method"], scope["path"]
        if path in ("/", "/docs"):
            return RedirectResponse(HOME if path == "/" else REFERENCE, 303)
        if path.startswith(f"{STATIC_PREFIX}/") and method in SAFE_METHODS:
            return None
        try:
            keys = await find_keys(self._keyring, self._machine, scope)
        except Problem as problem:
            return problem.response(path)
        if keys is not None and not keys:
            return self._machine.describe_refusal(scope).response(path)
        cookie = cookies.get(SESSION_COOKIE, "")
        key = open_session(keys or (), cookie, time.time())
        token = make_csrf_token(cookie if key is not None else visit)
        if path == LOGIN:
            # The form sends the CSRF token as a field, which routes.py checks.
            scope["state"]["keys"] = keys
            scope["state"]["visitor"] = Visitor(None, READ, token)
            return None
        if keys and key is None:
            return ask_for_login(scope, headers)
        scope["state"]["is_still_in"] = functools.partial(self._is_still_in, scope, cookie)
        scope["state"]["visitor"] = Visitor(key.name if key else None, key.scope if key else ADMIN, token)
        return self._find_refusal(scope, headers, key, token)

    async def _is_still_in(self, scope: Scope, cookie: str) -> bool:
        """Return whether the session is still valid. Without Postgres the last known keys decide."""
        with contextlib.suppress(SQLAlchemyError):
            await self._keyring.keys()
        keys = self._keyring.last_known
        if not keys and self._machine.admits(scope):
            return True
        return open_session(keys or self._machine.keys, cookie, time.time()) is not None

    def _find_refusal(
        self, scope: Scope, headers: Headers, key: CachedKey | None, token: str
    ) -> Response | None:
        """Return the error response to an unsafe method without CSRF token or write scope, else None."""
        method, path = scope["method"], scope["path"]
        if method in SAFE_METHODS:
            return None
        if headers.get(CSRF_HEADER) != token:
            return FORGED.response(path)
        needed = READ if path == LOGOUT else WRITE
        if key is not None and not includes(key.scope, needed):
            return scope_missing(key, needed).response(path)
        return None

    def _sending_pages(self, scope: Scope, request_headers: Headers, send: Send, cookie: str | None) -> Send:
        """Wrap `send` to add security headers and a new cookie, and to render problem details as a page.

        If htmx requested a part of a page, the problem becomes a notice on that page.
        """
        start: Message = {}
        body = bytearray()

        async def send_page(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                if headers.get("content-type") == MEDIA_TYPE:
                    start = message
                    return
                headers.update(HEADERS)
                if self._hsts_seconds and scope["scheme"] == "https":
                    headers["Strict-Transport-Security"] = f"max-age={self._hsts_seconds}"
                headers.setdefault("Cache-Control", "no-store")
                if cookie is not None:
                    headers.append("set-cookie", cookie)
            elif start:
                body.extend(message.get("body", b""))
                if message.get("more_body", False):
                    return
                page = self._render_problem(scope, request_headers, start["status"], bytes(body))
                start = {}
                await page(scope, no_message, send_page)
                return
            await send(message)

        return send_page

    def _render_problem(self, scope: Scope, headers: Headers, status: int, body: bytes) -> Response:
        problem = json.loads(body)
        visitor = scope["state"]["visitor"]
        if "hx-request" in headers:
            text = self._console.render("notice.html", visitor, problem=problem)
            return HTMLResponse(text, status, headers={"HX-Retarget": "#notices", "HX-Reswap": "innerHTML"})
        text = self._console.render("problem.html", visitor, scope["path"], problem=problem)
        return HTMLResponse(text, status)


async def no_message() -> Message:
    return {"type": "http.disconnect"}


def is_for_people(scope: Scope) -> bool:
    """Return whether the console serves this request: a path below /console, or a browser at / or /docs.

    A request for / or /docs with an API key, or one that does not accept HTML, goes to the API.
    """
    path = scope["path"]
    if path == ROOT or path.startswith(f"{ROOT}/"):
        return True
    headers = Headers(scope=scope)
    brings_key = any(name in headers for name in ("authorization", *KEY_HEADERS))
    is_browser = "text/html" in headers.get("accept", "") and not brings_key
    return path in ("/", "/docs") and scope["method"] in SAFE_METHODS and is_browser


def ask_for_login(scope: Scope, headers: Headers) -> Response:
    """Redirect to the login page, which leads back afterwards; htmx is sent a redirect of the whole page."""
    if "hx-request" in headers:
        return Response(status_code=401, headers={"HX-Redirect": LOGIN})
    if scope["method"] not in SAFE_METHODS:
        return RedirectResponse(LOGIN, 303)
    query = scope.get("query_string", b"").decode("latin-1")
    wanted = scope["path"] + (f"?{query}" if query else "")
    return RedirectResponse(f"{LOGIN}?next={quote(wanted, safe='')}", 303)


def write_cookie(name: str, value: str, *, is_secure: bool, seconds: int | None = None) -> str:
    """Return a Set-Cookie value for the console's paths: HttpOnly, SameSite=Strict, and Secure over HTTPS."""
    age = "" if seconds is None else f"; Max-Age={seconds}"
    return f"{name}={value}; Path={ROOT}; HttpOnly; SameSite=Strict{age}{'; Secure' if is_secure else ''}"


def read_cookies(headers: Headers) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}


SESSION_COOKIE: Final = "vectormill_console"
# The key has to be entered again this long after a login.
SESSION_SECONDS: Final = 12 * 3600
NONCE_BYTES: Final = 16
# The key's id, the end of the session (seconds since 1970), and a nonce.
HEAD: Final = struct.Struct(f">QQ{NONCE_BYTES}s")
# A key has up to 132 letters, so a longer cookie is rejected before base64 is decoded.
MAX_LETTERS: Final = 400


def seal_session(key: CachedKey, secret: str, now: float) -> str:
    """Return the session cookie. `secret` is the secret of `key`; `now` is in seconds since 1970."""
    head = HEAD.pack(key.id, int(now) + SESSION_SECONDS, secrets.token_bytes(NONCE_BYTES))
    return urlsafe_b64encode(head + _mask(secret.encode(), key.hash, head)).decode()


def open_session(keys: Sequence[CachedKey], cookie: str, now: float) -> CachedKey | None:
    """Return the key with which the session began; None when it has expired, is invalid, or its key is gone."""
    if len(cookie) > MAX_LETTERS:
        return None
    try:
        sealed = urlsafe_b64decode(cookie.encode("ascii"))
    except (NotBase64, ValueError):
        return None
    if len(sealed) <= HEAD.size:
        return None
    head, rest = sealed[: HEAD.size], sealed[HEAD.size :]
    key_id, ends_at, _ = HEAD.unpack(head)
    key = next((key for key in keys if key.id == key_id), None)
    if key is None or key.is_expired or ends_at <= now:
        return None
    secret = _mask(rest, key.hash, head).decode("utf-8", "surrogateescape")
    return key if hmac.compare_digest(hash_secret(secret), key.hash) else None


def _mask(content: bytes, key_hash: bytes, head: bytes) -> bytes:
    """Return content XOR a keystream of HMAC-SHA-256 in counter mode. Applied twice, it returns the content.

    The keystream is derived from `key_hash` and `head`.
    """
    stream = b""
    while len(stream) < len(content):
        block = len(stream).to_bytes(4) + head
        stream += hmac.digest(key_hash, b"vectormill console session" + block, hashlib.sha256)
    return bytes(ours ^ theirs for ours, theirs in zip(content, stream, strict=False))


VISIT_COOKIE: Final = "vectormill_visit"


def make_csrf_token(cookie: str) -> str:
    """Return the CSRF token of a cookie. Only our pages know it, because no script can read the cookie."""
    return hmac.digest(cookie.encode(), b"vectormill console csrf", hashlib.sha256).hex()
