"""Live views: parts of pages that are rendered once for all their viewers, and sent when they change.

The stream is Server-Sent Events; htmx replaces the element that follows the stream with each message.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.dependencies import Resources
from api.problems import is_database_away

LOOK_SECONDS: Final = 1.0
# Proxies close a connection that is silent for a minute.
SILENCE_SECONDS: Final = 15.0
RETRY_MILLISECONDS: Final = 2000


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered part of a page. `is_last` means that it cannot change any more, so the stream ends."""

    html: str
    is_last: bool = False


# Reads and renders a view, in a thread. The result must be the same for all viewers with the same key.
Render = Callable[[], Rendered]


@dataclass(slots=True)
class View:
    """A view as last rendered. Its lock makes concurrent viewers share one rendering."""

    num_viewers: int = 0
    rendered: Rendered | None = None
    read_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class LiveViews:
    """The views with at least one viewer, by key. They may be used from the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._views: dict[str, View] = {}

    @contextmanager
    def join(self, key: str) -> Iterator[View]:
        """Count one more viewer of the view during the block; remove the view after its last viewer."""
        view = self._views.setdefault(key, View())
        view.num_viewers += 1
        try:
            yield view
        finally:
            view.num_viewers -= 1
            if not view.num_viewers:
                del self._views[key]

    async def look(self, view: View, render: Render) -> Rendered:
        """Return the view, rendered again if the last rendering is LOOK_SECONDS old or older."""
        async with view.lock:
            if view.rendered is None or self._clock() - view.read_at >= LOOK_SECONDS:
                view.rendered = await run_in_threadpool(render)
                view.read_at = self._clock()
            return view.rendered


class LiveStream(StreamingResponse):
    """The event stream of one viewer. Serving it raises Problem when there are too many streams."""

    def __init__(self, resources: Resources, views: LiveViews, key: str, render: Render) -> None:
        self._resources = resources
        self._views = views
        self._key = key
        self._render = render
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources.gates.watchers.enter(), self._views.join(self._key) as view:
            # An error in the first rendering gets a separate response, before the stream begins.
            first = await self._views.look(view, self._render)
            self.body_iterator = self._follow(view, first, scope["state"]["is_still_in"])
            await super().__call__(scope, receive, send)

    async def _follow(
        self, view: View, rendered: Rendered, is_still_in: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[str]:
        """Yield the view whenever it changes, until its last rendering or the end of the session.

        A viewer whose key was revoked connects again and is then redirected to the login.
        """
        yield f"retry: {RETRY_MILLISECONDS}\n\n{write_message(rendered.html)}"
        last, spoken_at = rendered, time.monotonic()
        while not last.is_last and not self._resources.is_stopping():
            await anyio.sleep(LOOK_SECONDS)
            if not await is_still_in():
                return
            try:
                rendered = await self._views.look(view, self._render)
            except Exception as error:  # the stream outlives a restart of Postgres, but no other error
                if not is_database_away(error):
                    raise
            if rendered != last:
                last, spoken_at = rendered, time.monotonic()
                yield write_message(rendered.html)
            elif time.monotonic() - spoken_at > SILENCE_SECONDS:
                spoken_at = time.monotonic()
                yield ": still here\n\n"
        if last.is_last:
            yield "event: end\ndata: \n\n"


def write_message(html: str) -> str:
    """Return an unnamed event with the text, each line of which becomes a data line."""
    return "".join(f"data: {line}\n" for line in html.splitlines()) + "\n"
