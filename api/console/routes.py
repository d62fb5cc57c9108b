"""Routes of the console: all pages with their navigation, login and logout, assets, and API reference."""

import hmac
import re
import time
from typing import Any, Final
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from api.console import collections, jobs, schedules, submission, workers
from api.console.console import ROOT, Console, ConsoleDependency, Page, make_router
from api.console.guard import (
    FORGED,
    HOME,
    LOGOUT,
    REFERENCE,
    SESSION_COOKIE,
    SESSION_SECONDS,
    seal_session,
    write_cookie,
)
from api.door.admission import LOGIN
from api.door.machine import MachineUsers
from api.problems import Problem
from vectormill.keys.api_keys import CachedKey, find_key

# The order is that of the navigation, which lists the pages whose path has no parameter.
PAGES: Final[tuple[Page, ...]] = (*jobs.PAGES, *workers.PAGES, *collections.PAGES, *schedules.PAGES)

router = APIRouter(include_in_schema=False)
CONSOLE_ROUTERS: Final = (
    router,
    make_router(PAGES),
    jobs.router,
    submission.router,
    collections.router,
    schedules.router,
)

MAX_FORM_BYTES: Final = 16_384
# After a login only a page of the console on this host may be opened, so that `next` cannot lead to another
# site.
OWN_PAGE: Final = re.compile(r"/console(?:/[^\\\x00-\x1f]*)?(?:\?[^\\\x00-\x1f]*)?")


def make_console(version: str) -> Console:
    navigation = [(page.path, page.title) for page in PAGES if "{" not in page.path]
    return Console(version, [*navigation, (REFERENCE, "API")])


@router.get(ROOT)
@router.get(f"{ROOT}/")
async def get_root() -> RedirectResponse:
    return RedirectResponse(HOME, 303)


@router.get("/console/static/{digest}/{name}")
def get_asset(console: ConsoleDependency, digest: str, name: str) -> Response:
    """Return an asset; its address contains a digest of its content."""
    return console.answer_asset(digest, name)


@router.get(LOGIN)
async def get_login(
    request: Request, console: ConsoleDependency, next: str = HOME, ticket: str = ""
) -> Response:
    """Return the login form, or redirect to the home page if no key is needed.

    A `ticket` that `vectormill up` has printed lately takes the place of a key.
    """
    machine: MachineUsers = request.app.state.machine
    if machine.redeem(ticket):
        return begin_session(request, HOME, machine.keys[0], machine.secret)
    if not request.state.keys:
        return RedirectResponse(HOME, 303)
    return console.page(request, "login.html", next=find_own_page(next), refusal=None)


@router.post(LOGIN)
async def post_login(request: Request, console: ConsoleDependency) -> Response:
    """Set the cookie of a session, and redirect to the page that was requested before the login."""
    form = await read_form(request)
    token = request.state.visitor.csrf_token
    if not hmac.compare_digest(form.get("csrf", "").encode(), token.encode()):
        raise FORGED
    wanted = find_own_page(form.get("next", HOME))
    secret = form.get("key", "").strip()
    keyring = request.app.state.keyring
    key = find_key(request.state.keys, secret)
    if key is None:
        refusal = (
            "Unknown API key: it is mistyped, revoked or expired. `vectormill keys list` lists all keys."
        )
        return console.page(request, "login.html", 401, next=wanted, refusal=refusal)
    await keyring.note_use(key)
    return begin_session(request, wanted, key, secret)


def begin_session(request: Request, wanted: str, key: CachedKey, secret: str) -> Response:
    """Set the cookie of a session, and redirect to a page."""
    answer = RedirectResponse(wanted, 303)
    cookie = write_cookie(
        SESSION_COOKIE,
        seal_session(key, secret, time.time()),
        is_secure=request.url.scheme == "https",
        seconds=SESSION_SECONDS,
    )
    answer.headers.append("set-cookie", cookie)
    return answer


@router.post(LOGOUT)
async def post_logout(request: Request) -> Response:
    """Have the browser delete its session cookie.

    A copy of it stays valid until its key is revoked or it expires.
    """
    gone = write_cookie(SESSION_COOKIE, "", is_secure=request.url.scheme == "https", seconds=0)
    return Response(status_code=204, headers={"HX-Redirect": LOGIN, "Set-Cookie": gone})


@router.get(REFERENCE)
async def get_reference(request: Request, console: ConsoleDependency) -> HTMLResponse:
    """Return the reference of the HTTP API in Swagger UI."""
    return console.page(request, "reference.html")


@router.get("/docs")
async def get_docs(console: ConsoleDependency) -> HTMLResponse:
    """Return the API reference for a request that has its key in a header."""
    return HTMLResponse(console.render("reference.html", None, REFERENCE))


@router.get("/console/openapi.json")
async def get_description(request: Request) -> JSONResponse:
    """Return /openapi.json for a visitor with a session."""
    return JSONResponse(request.app.openapi())


def find_own_page(wanted: str) -> str:
    return wanted if OWN_PAGE.fullmatch(wanted) else HOME


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, the last value of each name.

    Raise Problem for more than MAX_FORM_BYTES.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            raise Problem(413, "submission-too-large", "The form is too large.")
    fields: dict[str, Any] = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[-1] for name, values in fields.items()}
