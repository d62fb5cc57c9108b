"""Patience: a connection is closed if the head of a request does not arrive in time.

uvicorn waits for a request's head for ever, and no middleware sees a request before its head is complete
(slow-loris). AdmissionControl times the body. uvicorn also sends a response's head in a packet of its own,
which wakes the client for nothing; here the head is sent with the body.
"""

import asyncio
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# Heads are parsed in the event loop; joining the pieces of a header takes time quadratic in their number.
MAX_HEAD_BYTES: Final = 64 << 10
CLOSING: Final = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
LARGE_HEAD: Final = b"The head of this request is larger than 64 KiB."
TOO_MANY: Final = b"This API process has as many connections as it takes (VECTORMILL_MAX_CONNECTIONS)."


class PatientConfig(uvicorn.Config):
    """uvicorn's configuration with limits on the time for a request's head and on the number of connections."""

    def __init__(
        self, *arguments: Any, head_seconds: float, max_connections: int = 512, **options: Any
    ) -> None:
        super().__init__(*arguments, **{**options, "http": PatientProtocol})
        self.head_seconds = head_seconds
        self.max_connections = max_connections


class HeadCoalescer:
    """A transport that holds a response's head back until the body comes.

    The head waits no longer than this turn of the event loop.
    """

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
    """One HTTP connection with limits on request heads.

    Between requests, uvicorn's keep-alive time-out applies.
    """

    _timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _num_heads = 0
    _head_bytes = 0  # of the incomplete head, without the read in which it began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, HeadCoalescer(transport, self.loop))
        assert isinstance(self.config, PatientConfig)
        if len(self.connections) > self.config.max_connections:
            self._refuse(b"503 Service Unavailable", TOO_MANY)
            return
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        num_heads = self._num_heads
        super().data_received(data)
        if self._timer is not None and self._num_heads == num_heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", LARGE_HEAD)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_heads += 1
        self._head_bytes = 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _refuse(self, status: bytes, reason: bytes) -> None:
        """Close the connection, after an error response if no other response is in progress."""
        self._stop_timer()
        cycle = cast(RequestResponseCycle | None, self.cycle)  # None before the first request
        if cycle is None or cycle.response_complete:
            self.transport.write(b"HTTP/1.1 %s\r\n" % status + CLOSING % (len(reason), reason))
        self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        assert isinstance(self.config, PatientConfig)
        self._timer = self.loop.call_later(self.config.head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
