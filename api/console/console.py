"""The console as one thing: its templates, assets and live views, made once for an API process."""

from typing import Annotated, Any, cast

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse

from api.console.assets import Assets
from api.console.jobs.history import Histories
from api.console.live import LiveViews
from api.console.navigation import NAVIGATION
from api.console.rendering import make_templates
from api.console.visitor import Visitor, find_visitor


class Console:
    """The parts that the routes of the console share. Templates get a visitor, the page's path, and these values."""

    def __init__(self, version: str) -> None:
        self.assets = Assets()
        self.views = LiveViews()
        self.histories = Histories()
        self._templates = make_templates(asset=self.assets.url, navigation=NAVIGATION, version=version)

    def render(self, name: str, visitor: Visitor | None, path: str = "", **values: Any) -> str:
        """Return a template's text. `path` is of the page that is asked for; a part of a page needs none."""
        return self._templates.get_template(name).render(visitor=visitor, path=path, **values)

    def page(self, request: Request, name: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Return a whole page, for the visitor who asks."""
        text = self.render(name, find_visitor(request), request.url.path, **values)
        return HTMLResponse(text, status_code=status)


async def get_console(request: Request) -> Console:
    return cast(Console, request.app.state.console)


async def get_visitor(request: Request) -> Visitor:
    return find_visitor(request)


ConsoleDependency = Annotated[Console, Depends(get_console)]
VisitorDependency = Annotated[Visitor, Depends(get_visitor)]
