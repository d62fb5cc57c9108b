"""Our page of Flower's, and links to it and to the console in the bar on top of every page.

Flower's templates are used as they are: the links are put into the bar when it is read, so that a newer Flower
whose bar looks different lacks two links and shows all else.
"""

import logging
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from flower.views import BaseHandler
from tornado import web
from tornado.template import Loader, Template

from vectormill.flower_pages.backlog import BacklogReader

logger = logging.getLogger(__name__)

PAGE: Final = "backlog.html"
NAVBAR: Final = "navbar.html"
REFRESH_SECONDS: Final = 5
# Behind the last of the pages.
END_OF_PAGES: Final = "      </ul>\n"
LINKS: Final = """
        <li class="nav-item">
          <a class="nav-link{% if active_tab == 'backlog' %} active{% end %}" href="{{ reverse_url('backlog') }}"
            {% if active_tab == 'backlog' %}aria-current="page"{% end %}>Backlog</a>
        </li>
        <li class="nav-item">
          <a class="nav-link" href="{{ handler.settings['console_url'](handler.request) }}">Console</a>
        </li>
"""


def add_backlog(
    handlers: list[Any],
    settings: MutableMapping[str, Any],
    reader: BacklogReader,
    *,
    console_url: str | None,
    api_port: int,
) -> None:
    """Changes Flower's own handlers and settings, before it starts. The last handler answers 404 to everything."""

    def find_console(request: Any) -> str:
        return find_console_url(console_url, request.host, api_port)

    handlers.insert(-1, web.url(r"/backlog", BacklogView, {"reader": reader}, name="backlog"))
    settings["template_loader"] = PageLoader(settings["template_path"])
    settings["console_url"] = find_console


def find_console_url(console_url: str | None, host: str, api_port: int) -> str:
    """Where a browser finds the console: as it was set, else at the API's port of the host that serves this page."""
    if console_url is not None:
        return console_url
    name = urlsplit(f"//{host}").hostname or "localhost"
    return f"http://{f'[{name}]' if ':' in name else name}:{api_port}/console"


class PageLoader(Loader):
    """Flower's templates, with our page among them and our links in its bar."""

    def _create_template(self, name: str) -> Template:
        if name == PAGE:
            return Template(
                (Path(__file__).parent / PAGE).read_text(encoding="utf-8"), name=name, loader=self
            )
        if name == NAVBAR:
            text = (Path(self.root) / NAVBAR).read_text(encoding="utf-8")
            before, found, behind = text.partition(END_OF_PAGES)
            if found:
                return Template(before + LINKS + found + behind, name=name, loader=self)
            logger.warning("Flower's bar has no place for our links: the backlog is at /backlog.")
        return super()._create_template(name)


class BacklogView(BaseHandler):  # type: ignore[misc]  # Flower has no types
    def initialize(self, reader: BacklogReader) -> None:
        self._reader = reader

    @web.authenticated
    async def get(self) -> None:
        """Read beside the loop, which has events to take."""
        backlog = await self.application.io_loop.run_in_executor(None, self._reader.read)
        self.set_header("Refresh", str(REFRESH_SECONDS))
        self.set_header("Cache-Control", "no-store")
        self.render(PAGE, backlog=backlog, describe_age=describe_age)


def describe_age(seconds: float | None) -> str:
    """In the two largest units that there are: 3 h 5 min."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number) or "0 s"
