"""Pages: the description of a page, from which its route, its live stream and its actions are made.

The changing part of a page is read and rendered once for all visitors with the same rights, and sent to them
whenever it has changed (live.py).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from api.console.console import ROOT, Console, ConsoleDependency, LiveStream, Rendered, VisitorDependency
from api.dependencies import Resources, ResourcesDependency
from api.problems import Problem
from vectormill.domain.errors import NotFound

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
