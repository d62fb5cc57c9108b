"""RequestObserver: gives each request an id, counts and times it, and records a span if tracing is on.

Every response has the id in `x-request-id`. A client may choose the id, if it is safe to log: short and
without blanks.
"""

import re
import secrets
import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.metrics import ApiMetrics
from vectormill.processes.logs import logging_with
from vectormill.tracing import NOTHING, is_tracing, span

HEADER: Final = b"x-request-id"
SANE: Final = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
# The entry of a request's ASGI scope that holds its id.
KEY: Final = "vectormill.request_id"
# Paths that machines poll all the time, and that are never slow for a reason of their own.
NOT_TRACED: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})


class RequestObserver:
    """The outermost ASGI middleware, which also observes requests that admission control refuses.

    It reads no body.
    """

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, method = scope["headers"], scope["method"]
        # The client's id if it is well-formed, else a new one.
        given = (bytes(value) for name, value in headers if name == HEADER and SANE.fullmatch(value))
        request_id = scope[KEY] = next(given, None) or b"req_" + secrets.token_hex(16).encode()
        is_traced = is_tracing() and scope["path"] not in NOT_TRACED
        parent = next((value.decode("latin-1") for name, value in headers if name == b"traceparent"), None)
        opened = span(method, kind="server", parent=parent) if is_traced else NOTHING
        status = 500  # what the server answers when the application raises

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id)]
            await send(message)

        began = time.perf_counter()
        with logging_with(request_id=request_id.decode()), opened as note:
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                # The route's template, not its path, since ids in labels would make a time series per job.
                route = getattr(scope.get("route"), "path", "unmatched")
                self._metrics.requests.labels(method, route, str(status)).inc()
                self._metrics.request_seconds.labels(method, route).observe(time.perf_counter() - began)
                note.rename(f"{method} {route}")
                note.tell(route=route, status=status)
                if status >= 500:
                    note.fail(f"It answered {status}.")


def read_request_id(scope: Scope) -> str:
    """Return the id of a request; empty if the observer did not run."""
    return bytes(scope.get(KEY, b"")).decode()
