"""Console: templates and assets of all pages, loaded once per API process, their streams, and the visitor of a request.

A part of a page that changes is rendered once for all its viewers; htmx replaces the element that follows the stream
with each message.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.types import Scope

from api.console import formats
from api.console.history import Histories
from api.dependencies import Resources, ResourcesDependency
from api.event_stream import EventStream
from api.problems import Problem
from api.watch import Watch
from vectormill.collections.collection import find_kind
from vectormill.collections.sizing import describe_bytes
from vectormill.domain.errors import NotFound
from vectormill.domain.states import IDLE
from vectormill.jobs.job import JOB_STATE_BY_NAME
from vectormill.keys.api_key import WRITE, includes
from vectormill.runs.run import STEERABLE_RUN_STATES
from vectormill.workers.plan_picture import format_gib

FOLDER: Final = Path(__file__).parent
ROOT: Final = "/console"
STATIC_PREFIX: Final = "/console/static"
MEDIA_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# An asset's address contains a digest of its content, so a browser never has to request the asset again.
FOR_EVER: Final = "public, max-age=31536000, immutable"
DIGEST_LETTERS: Final = 12

FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "count": formats.format_count,
    "about": formats.format_rounded,
    "bytes": describe_bytes,
    "gib": format_gib,
    "rate": formats.format_rate,
    "share": formats.format_percent,
    "duration": formats.format_duration,
    "moment": formats.format_moment,
    "ago": formats.format_age,
    "state": lambda state: state.replace("_", " "),
    "tone": lambda state: formats.TONES.get(state, IDLE),
    "stage": lambda stage: formats.STAGE_WORDS.get(stage, stage),
    "sentence": formats.mark_code,
    "query": lambda given: urlencode({name: value for name, value in given.items() if value is not None}),
    "json": partial(json.dumps, ensure_ascii=False),
    "excerpt": formats.shorten,
    "kind": find_kind,
}


@dataclass(frozen=True, slots=True)
class Visitor:
    """The user of a browser.

    `key_name` is None if no API key exists; then everything is allowed, as over HTTP.
    """

    key_name: str | None
    scope: str
    csrf_token: str

    @property
    def can_write(self) -> bool:
        return includes(self.scope, WRITE)


@dataclass(frozen=True, slots=True)
class Asset:
    """A script, style sheet or picture whose address contains a digest of its content."""

    name: str
    path: Path
    digest: str

    @property
    def url(self) -> str:
        return f"{STATIC_PREFIX}/{self.digest}/{self.name}"


def find_assets() -> dict[str, Asset]:
    """Return all assets by file name.

    Folders and versions of vendored assets are not part of their address.
    """
    assets: dict[str, Asset] = {}
    for path in sorted((FOLDER / "static").rglob("*")):
        if path.suffix in MEDIA_TYPES:
            assert path.name not in assets, f"two assets are named {path.name}"
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_LETTERS]
            assets[path.name] = Asset(path.name, path, digest)
    return assets


def make_templates(**given: Any) -> Environment:
    """Return templates that escape all values, fail on missing ones, and share the global values `given`."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(FILTERS)
    environment.globals.update(
        given, job_states=JOB_STATE_BY_NAME.values(), steerable_run_states=STEERABLE_RUN_STATES
    )
    return environment


class Console:
    """The state that all routes of the console share: templates, assets, live views and histories of jobs.

    `navigation` lists the path and title of each page that all pages link to.
    """

    def __init__(self, version: str, navigation: Sequence[tuple[str, str]]) -> None:
        self.views = Watch[str, Rendered](LOOK_SECONDS)
        self.histories = Histories()
        self._assets = find_assets()
        self._templates = make_templates(
            asset=lambda name: self._assets[name].url, navigation=navigation, version=version
        )

    def render(
        self, name: str, visitor: Visitor | None, path: str = "", host: str = "", **values: Any
    ) -> str:
        """Return a template's text. `path` and `host` are those of the request, and empty for a part of a page."""
        return self._templates.get_template(name).render(visitor=visitor, path=path, host=host, **values)

    def page(self, request: Request, name: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Return a whole page as a response, rendered for the visitor of the request."""
        text = self.render(name, request.state.visitor, request.url.path, request.url.netloc, **values)
        return HTMLResponse(text, status_code=status)

    def answer_asset(self, digest: str, name: str) -> Response:
        """Return an asset as a response. Raise HTTPException 404 for an unknown name.

        A page of another release requests another digest; it gets this release's asset, which it must not
        cache.
        """
        asset = self._assets.get(name)
        if asset is None:
            raise HTTPException(404)
        kept = FOR_EVER if digest == asset.digest else "no-store"
        media_type = MEDIA_TYPES[asset.path.suffix]
        return Response(asset.path.read_bytes(), media_type=media_type, headers={"Cache-Control": kept})


async def get_console(request: Request) -> Console:
    return cast(Console, request.app.state.console)


async def get_visitor(request: Request) -> Visitor:
    """Return the visitor whom the guard has admitted."""
    return cast(Visitor, request.state.visitor)


ConsoleDependency = Annotated[Console, Depends(get_console)]
VisitorDependency = Annotated[Visitor, Depends(get_visitor)]


LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered part of a page. `is_last` means that it cannot change any more, so the stream ends."""

    html: str
    is_last: bool = False


class LiveStream(EventStream[Rendered]):
    """The event stream of one viewer. `render` reads and renders the view."""

    def __init__(
        self, resources: Resources, views: Watch[str, Rendered], key: str, render: Callable[[], Rendered]
    ) -> None:
        self._render = render
        super().__init__(resources, views, key)

    def read(self) -> Rendered:
        return self._render()

    def write(self, value: Rendered) -> bytes:
        return (write_message(value.html) + "event: end\ndata: \n\n" * value.is_last).encode()

    def is_last(self, value: Rendered) -> bool:
        return value.is_last

    async def may_go_on(self, scope: Scope) -> bool:
        """A viewer whose key was revoked connects again and is then redirected to the login."""
        return bool(await scope["state"]["is_still_in"]())


def write_message(html: str) -> str:
    """Return an unnamed event with the text, each line of which becomes a data line."""
    return "".join(f"data: {line}\n" for line in html.splitlines()) + "\n"


LIVE: Final = "/console/live"

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of the console.

    `read(connection, console, ...)` returns the view that `template` shows; its further parameters come from
    the request, and also fill in the title. `above` is a template for the part of the page that is not
    updated live. The values of `actions` are the functions of buttons, called with the resources and the
    path's parameter. `is_last` returns whether a view is final, which ends the live stream.
    """

    path: str
    title: str
    template: str
    read: Callable[..., Any]
    lead: str = ""
    above: str | None = None
    actions: Mapping[str, Callable[[Resources, Any], object]] = field(default_factory=dict)
    is_last: Callable[[Any], bool] = lambda view: False


@dataclass(frozen=True, slots=True)
class Visit:
    """A request for a page: its parameters, and whether the visitor may write."""

    page: Page
    given: dict[str, Any]
    can_write: bool

    @property
    def title(self) -> str:
        return self.page.title.format_map(self.given)

    @property
    def key(self) -> str:
        """Return the key of the live view: visits with the same key see the same content."""
        return f"{self.page.path} {self.given} {self.can_write}"

    def read(self, resources: Resources, console: Console) -> tuple[Any, Rendered]:
        """Return the view and its rendered part. Raise NotFound when its subject does not exist."""
        with resources.engine.connect() as connection:
            view = self.page.read(connection, console, **self.given)
        html = console.render(self.page.template, None, view=view, can_write=self.can_write)
        return view, Rendered(html, self.page.is_last(view))

    def follow(self, resources: Resources, console: Console) -> Rendered:
        """Return the rendered part as it is now; a subject that was removed meanwhile is shown as gone."""
        try:
            return self.read(resources, console)[1]
        except NotFound:
            return Rendered(console.render("gone.html", None, title=self.title), is_last=True)


def make_router(pages: Sequence[Page]) -> APIRouter:
    """Return a router with the routes of these pages."""
    router = APIRouter(include_in_schema=False)
    for page in pages:
        add_page(router, page)
    return router


def add_page(router: APIRouter, page: Page) -> None:
    """Add the routes of a page: the page itself, its live stream, and its actions."""
    parameters = Depends(take_parameters(page.read))

    async def get_page(
        request: Request,
        resources: ResourcesDependency,
        console: ConsoleDependency,
        visitor: VisitorDependency,
        given: Annotated[dict[str, Any], parameters],
    ) -> HTMLResponse:
        visit = Visit(page, given, visitor.can_write)
        view, part = await run_in_threadpool(visit.read, resources, console)
        live = LIVE + quote(request.scope["path"].removeprefix(ROOT))
        if request.url.query:
            live += f"?{request.url.query}"
        return console.page(
            request, "page.html", page=page, title=visit.title, view=view, part=part, live=live
        )

    async def get_live(
        resources: ResourcesDependency,
        console: ConsoleDependency,
        visitor: VisitorDependency,
        given: Annotated[dict[str, Any], parameters],
    ) -> LiveStream:
        visit = Visit(page, given, visitor.can_write)
        return LiveStream(resources, console.views, visit.key, lambda: visit.follow(resources, console))

    def post_action(
        resources: ResourcesDependency,
        console: ConsoleDependency,
        visitor: VisitorDependency,
        action: str,
        given: Annotated[dict[str, Any], parameters],
    ) -> HTMLResponse:
        """Carry out an action, and return the part as it is afterwards."""
        find_action(page.actions, action)(resources, *given.values())
        return HTMLResponse(Visit(page, given, visitor.can_write).read(resources, console)[1].html)

    router.add_api_route(page.path, get_page, methods=["GET"])
    router.add_api_route(LIVE + page.path.removeprefix(ROOT), get_live, methods=["GET"])
    if page.actions:
        router.add_api_route(f"{page.path}/{{action}}", post_action, methods=["POST"])


def take_parameters(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a FastAPI dependency for the parameters of `read` other than the connection and the console."""

    async def take(**given: Any) -> dict[str, Any]:
        return given

    parameters = list(inspect.signature(read).parameters.values())[2:]
    take.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return take


def find_action(actions: Mapping[str, Row], name: str) -> Row:
    """Return the action of this name. Raise Problem if there is none."""
    if name not in actions:
        raise Problem(
            404, "not-found", f"Unknown action {name[:40]!r}; expected one of: {', '.join(actions)}."
        )
    return actions[name]
