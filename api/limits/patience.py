"""Patience: a connection whose request has no whole head in time is closed. The body is timed by RequestLimits.

uvicorn waits for a head for ever, and no middleware knows of a request before its head is whole (slow-loris). And it
sends the head of an answer by itself, which wakes the client for nothing: here it goes with what follows at once.
"""

import asyncio
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class PatientConfig(uvicorn.Config):
    """uvicorn's own, with the time that a head may take."""

    def __init__(self, *arguments: Any, head_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "http": PatientProtocol})
        self.head_seconds = head_seconds


class HeadKeeper:
    """A transport that keeps the head of an answer until the body comes, but not beyond this turn of the event loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, content: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + content)
        elif content.startswith(b"HTTP/1.1 "):
            self._head = content
            self._loop.call_soon(self._send_head)
        else:
            self._transport.write(content)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head:
            self.write(b"")


class PatientProtocol(HttpToolsProtocol):
    """One connection. Between two requests it is uvicorn's keep-alive that closes it."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, HeadKeeper(transport, self.loop))
        self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._stop_timer()
        assert isinstance(self.config, PatientConfig)
        self._timer = self.loop.call_later(self.config.head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
