"""RequestLimits: how many requests are served at once, and how long a body may be silent. Knows only probes by name.

A client that sends its body byte by byte, or not at all (slow-loris), would hold what its request holds for ever.
"""

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.limits.gates import Gate
from api.problems import Limit, Problem
from vectormill.domain.errors import BodyTimeout
from vectormill.settings import Settings

# Whoever asks whether a full process lives is told so.
PROBES: Final = ("/livez", "/readyz")


class RequestLimits:
    """ASGI middleware. It adds nothing to a body's way but a timer, so streams stay streams."""

    def __init__(self, app: ASGIApp, settings: Settings, gate: Gate) -> None:
        self._app = app
        self._idle = Limit.of(settings, "body_idle_seconds")
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in PROBES:
            await self._app(scope, self._time(receive), send)
        else:
            try:
                with self._gate.enter():
                    await self._app(scope, self._time(receive), send)
            except Problem as problem:  # the application answers its own
                await problem.response(scope["path"])(scope, receive, send)

    def _time(self, receive: Receive) -> Receive:
        """The same messages. Raises Problem when the next part of the body does not come."""
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:  # what comes now is that the client leaves, whenever it does
                return await receive()
            try:
                async with asyncio.timeout(self._idle.value):
                    message = await receive()
            except TimeoutError:
                raise Problem(
                    408,
                    BodyTimeout.code,
                    f"No byte of the body came for {self._idle.value:g} s ({self._idle.setting}); nothing was stored.",
                    limit=self._idle,
                    headers={"Connection": "close"},
                ) from None
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        return receive_in_time
