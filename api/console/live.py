"""Live views: parts of pages that are rendered once for all their viewers, and sent when they change.

htmx replaces the element that follows the stream with each message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from api.dependencies import Resources
from api.event_stream import EventStream
from api.watch import Watch

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
