"""The console's entry: login and logout, its assets, and the reference of the HTTP interface."""

import hmac
import re
import time
from typing import Any, Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from api.console.console import ConsoleDependency
from api.console.guard import FORGED, HOME, LOGIN, LOGOUT, REFERENCE, ROOT, write_cookie
from api.console.sessions import SESSION_COOKIE, SESSION_SECONDS, seal_session
from api.console.visitor import find_visitor
from api.dependencies import ResourcesDependency
from api.problems import Problem
from vectormill.keys.keyring import find_key

router = APIRouter(include_in_schema=False)

MAX_FORM_BYTES: Final = 16_384
# Where a login may lead: to a page of ours, on this host.
OWN_PAGE: Final = re.compile(r"/console(?:/[^\\\x00-\x1f]*)?(?:\?[^\\\x00-\x1f]*)?")


@router.get(ROOT)
async def get_root() -> RedirectResponse:
    return RedirectResponse(HOME, 303)


@router.get("/console/static/{digest}/{name}")
def get_asset(console: ConsoleDependency, digest: str, name: str) -> Response:
    """Return a file; its address names its content."""
    return console.assets.answer(digest, name)


@router.get(LOGIN)
async def get_login(request: Request, console: ConsoleDependency, next: str = HOME) -> Response:
    """Return the form that takes a key."""
    keyring = request.app.state.keyring
    if not await keyring.keys():
        return RedirectResponse(HOME, 303)
    return console.page(request, "login.html", next=find_own_page(next), refusal=None)


@router.post(LOGIN)
async def post_login(request: Request, console: ConsoleDependency) -> Response:
    """Set the cookie of a session and leads to the page that was wanted."""
    form = await read_form(request)
    if not hmac.compare_digest(form.get("csrf", "").encode(), find_visitor(request).csrf_token.encode()):
        raise FORGED
    wanted = find_own_page(form.get("next", HOME))
    secret = form.get("key", "").strip()
    keyring = request.app.state.keyring
    key = find_key(await keyring.keys(), secret)
    if key is None:
        refusal = "This key opens nothing: it is misspelt, revoked or expired; `vectormill keys list` tells."
        return console.page(request, "login.html", 401, next=wanted, refusal=refusal)
    await keyring.note_use(key)
    answer = RedirectResponse(wanted, 303)
    is_secure = request.url.scheme == "https"
    cookie = seal_session(key, secret, time.time())
    answer.headers.append(
        "set-cookie", write_cookie(SESSION_COOKIE, cookie, is_secure=is_secure, seconds=SESSION_SECONDS)
    )
    return answer


@router.post(LOGOUT)
async def post_logout(request: Request) -> Response:
    """Have the browser forget the session. A copy of its cookie stays valid: revoke the key to end it."""
    gone = write_cookie(SESSION_COOKIE, "", is_secure=request.url.scheme == "https", seconds=0)
    return Response(status_code=204, headers={"HX-Redirect": LOGIN, "Set-Cookie": gone})


@router.get(REFERENCE)
async def get_reference(request: Request, console: ConsoleDependency) -> HTMLResponse:
    """Return the reference of the HTTP interface, as Swagger UI shows it."""
    return console.page(request, "reference.html")


@router.get("/docs")
async def get_docs(console: ConsoleDependency) -> HTMLResponse:
    """Return the API reference for a request with a key in a header."""
    return HTMLResponse(console.render("reference.html", None, REFERENCE))


@router.get("/console/openapi.json")
async def get_description(request: Request, resources: ResourcesDependency) -> JSONResponse:
    """Return /openapi.json for a visitor with a session."""
    return JSONResponse(request.app.openapi())


def find_own_page(wanted: str) -> str:
    return wanted if OWN_PAGE.fullmatch(wanted) else HOME


async def read_form(request: Request) -> dict[str, str]:
    """Fields of a small form, the last of each name. Raise Problem when it is large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            raise Problem(413, "submission-too-large", "The form is too large.")
    fields: dict[str, Any] = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[-1] for name, values in fields.items()}
