"""RequestTraces: a span for each request, within the trace of a client that has one. Nothing where none is recorded."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vectormill.tracing import is_tracing, span

# Asked again and again by machines, and never slow for a reason of their own.
NOT_TRACED = frozenset({"/livez", "/readyz", "/health", "/metrics"})


class RequestTraces:
    """ASGI middleware. Of a path the template is told, never an id; of a body nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_tracing() or scope["type"] != "http" or scope["path"] in NOT_TRACED:
            await self._app(scope, receive, send)
            return
        status = 500  # what the server answers when the application raises

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with span(scope["method"], kind="server", parent=read_traceparent(scope)) as note:
            try:
                await self._app(scope, receive, note_status)
            finally:
                route = getattr(scope.get("route"), "path", "unmatched")
                note.rename(f"{scope['method']} {route}")
                note.tell(route=route, status=status)
                if status >= 500:
                    note.fail(f"It answered {status}.")


def read_traceparent(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"traceparent":
            return bytes(value).decode("latin-1")
    return None
