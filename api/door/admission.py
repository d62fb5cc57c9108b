"""AdmissionControl: admits requests within the limits, under a name of this API, with a key or a session.

A client that sends its body byte by byte, or not at all (slow-loris), would occupy its request's share of the
limits for ever, so the arrival of the body is timed. It is not buffered: streams stay streams.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.door.hosts import AllowedHosts, find_host_problem
from api.door.keys import KeyGuard
from api.limits.gates import Gates
from api.limits.patience import PROBES
from api.problems import Limit, Problem
from vectormill.domain.errors import BodyTimeout
from vectormill.settings import Settings

# The login form needs no API key. It must arrive within this time, and logins have a limit of their own.
LOGIN: Final = "/console/login"
LOGIN_SECONDS: Final = 10.0
FORM_TOO_SLOW: Final = Problem(
    408, BodyTimeout.code, "The form did not arrive in time; send it again.", headers={"Connection": "close"}
)


class AdmissionControl:
    """ASGI middleware for admission control.

    Requests for which `is_for_people` is true go to `pages`, which checks sessions; all others need a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        gates: Gates,
        hosts: AllowedHosts,
        keys: KeyGuard,
        pages: Callable[[ASGIApp], ASGIApp],
        is_for_people: Callable[[Scope], bool],
    ) -> None:
        self._app = app
        self._idle = Limit.of(settings, "body_idle_seconds")
        self._gates = gates
        self._hosts = hosts
        self._keys = keys
        self._pages = pages(app)
        self._is_for_people = is_for_people

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        try:
            if path in PROBES:
                await self._let_in(scope, self._time(receive), send)
            elif path == LOGIN:
                with self._gates.logins.enter():
                    await self._let_in(scope, self._time(receive, LOGIN_SECONDS), send)
            else:
                with self._gates.requests.enter():
                    await self._let_in(scope, self._time(receive), send)
        except Problem as problem:  # raised by this middleware: the application answers its own
            await problem.response(path)(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = find_host_problem(self._hosts, scope)
        if problem is not None:
            raise problem
        # Checked before the key: a browser that opens / or /docs without a key gets a page, not an error.
        if self._is_for_people(scope):
            await self._pages(scope, receive, send)
            return
        async with self._keys.admit(scope):
            await self._app(scope, receive, send)

    def _time(self, receive: Receive, whole_seconds: float | None = None) -> Receive:
        """Return `receive` with time limits.

        It raises Problem if the next part of the body, or the whole body, does not arrive in time.
        """
        is_whole = False
        deadline = (
            None
            if whole_seconds is None
            else asyncio.get_running_loop().time() + min(whole_seconds, self._idle.value)
        )

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:  # the only message left is the client's disconnect, at any time
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
                    f"No part of the body arrived for {self._idle.value:g} s ({self._idle.setting}); "
                    "nothing was stored.",
                    limit=self._idle,
                    headers={"Connection": "close"},
                ) from None
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        return receive_in_time
