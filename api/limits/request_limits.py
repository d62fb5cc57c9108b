"""RequestLimits: how many requests are served at once, and how long a body may take. Knows probes and logins by name.

A client that sends its body byte by byte, or not at all (slow-loris), would hold what its request holds for ever.
"""

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.limits.gates import Gates
from api.problems import Limit, Problem
from vectormill.domain.errors import BodyTimeout
from vectormill.settings import Settings

# Whoever asks whether a full process lives is told so.
PROBES: Final = ("/livez", "/readyz", "/health")
# The login form needs no API key. It must arrive whole within this time, and logins have a limit of their own.
LOGIN: Final = "/console/login"
LOGIN_SECONDS: Final = 10.0
FORM_TOO_SLOW: Final = Problem(
    408, BodyTimeout.code, "The form did not come in time; send it again.", headers={"Connection": "close"}
)


class RequestLimits:
    """ASGI middleware. It adds nothing to a body's way but a timer, so streams stay streams."""

    def __init__(self, app: ASGIApp, settings: Settings, gates: Gates) -> None:
        self._app = app
        self._idle = Limit.of(settings, "body_idle_seconds")
        self._gates = gates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in PROBES:
            await self._app(scope, self._time(receive), send)
        else:
            is_login = scope["path"] == LOGIN
            gate = self._gates.logins if is_login else self._gates.requests
            try:
                with gate.enter():
                    await self._app(scope, self._time(receive, LOGIN_SECONDS if is_login else None), send)
            except Problem as problem:  # the application answers its own
                await problem.response(scope["path"])(scope, receive, send)

    def _time(self, receive: Receive, whole_seconds: float | None = None) -> Receive:
        """Wrap `receive` with time limits.

        Raises:
            Problem: the next part of the body, or the whole body, did not arrive in time.
        """
        is_whole = False
        deadline = (
            None
            if whole_seconds is None
            else asyncio.get_running_loop().time() + min(whole_seconds, self._idle.value)
        )

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:  # what comes now is that the client leaves, whenever it does
                return await receive()
            try:
                async with asyncio.timeout(self._idle.value), asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                if deadline is not None:
                    raise FORM_TOO_SLOW from None
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
