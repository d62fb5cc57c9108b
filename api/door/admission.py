"""AdmissionControl: lets a request in within the limits, under a name of this API, and with a key or a session.

A client that sends its body byte by byte, or not at all (slow-loris), would hold what its request holds for ever: the
body is timed, by a timer alone, so that streams stay streams.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.door.hosts import AllowedHosts, find_host_problem
from api.door.keys import KeyGuard
from api.limits.gates import Gates
from api.problems import Limit, Problem
from vectormill.domain.errors import BodyTimeout
from vectormill.settings import Settings

# Probes of a full process are answered, too.
PROBES: Final = ("/livez", "/readyz", "/health")
# The login form needs no API key. It must arrive whole within this time, and logins have a limit of their own.
LOGIN: Final = "/console/login"
LOGIN_SECONDS: Final = 10.0
FORM_TOO_SLOW: Final = Problem(
    408, BodyTimeout.code, "The form did not come in time; send it again.", headers={"Connection": "close"}
)


class AdmissionControl:
    """ASGI middleware. What `is_for_people` goes to `pages`, which knows sessions; all else needs a key."""

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
        except Problem as problem:  # the application answers its own
            await problem.response(path)(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = find_host_problem(self._hosts, scope)
        if problem is not None:
            raise problem
        # Before the key: a browser that brings none to / or /docs is shown the way.
        if self._is_for_people(scope):
            await self._pages(scope, receive, send)
            return
        async with self._keys.admit(scope):
            await self._app(scope, receive, send)

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
