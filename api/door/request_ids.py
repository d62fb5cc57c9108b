"""RequestIds: every answer says which request it is of, in `x-request-id`; a client that names its request is heard.

The id of a client goes on only if it is one that can stand in a log: short, and without blanks.
"""

import re
import secrets
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vectormill.processes.logs import logging_with

HEADER: Final = b"x-request-id"
SANE: Final = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
# Where the id stands in the scope of a request.
KEY: Final = "vectormill.request_id"


class RequestIds:
    """ASGI middleware, the outermost: what the door refuses has an id too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[KEY] = choose_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id)]
            await send(message)

        with logging_with(request_id=request_id.decode()):
            await self._app(scope, receive, send_with_id)


def choose_id(scope: Scope) -> bytes:
    """Return the client's id for the request if it is well-formed, else a new one."""
    for name, value in scope["headers"]:
        if name == HEADER and SANE.fullmatch(value):
            return bytes(value)
    return b"req_" + secrets.token_hex(16).encode()


def read_request_id(scope: Scope) -> str:
    """The id of a request; empty where no middleware gave it one."""
    return bytes(scope.get(KEY, b"")).decode()
