"""Patience: a connection is closed if the head of a request does not arrive in time.

uvicorn waits for a request's head for ever, and no middleware sees a request before its head is complete
(slow-loris). AdmissionControl times the body. No peer gets all connections, and probes have some of their own, so that
a flood of silent connections neither keeps others out nor has this process restarted. uvicorn also sends a response's
head in a packet of its own, which wakes the client for nothing; here the head is sent with the body.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any, Final, cast

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.door.machine import USER, find_user

# Heads are parsed in the event loop; joining the pieces of a header takes time quadratic in their number.
MAX_HEAD_BYTES: Final = 64 << 10
CLOSING: Final = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
LARGE_HEAD: Final = b"The head of this request is larger than 64 KiB."
TOO_MANY: Final = (
    b"This API process has as many connections as it takes, or you have (VECTORMILL_MAX_CONNECTIONS)."
)
# Health probes, which are answered even if the process is at its limits of connections or requests.
PROBES: Final = ("/livez", "/readyz", "/health")
# The share of all connections that one address may have. A trusted proxy, which has many clients, may have all.
PEER_SHARE: Final = 0.75
# Connections beyond the others that probes alone may use, how many of them one address may have, and the seconds for
# the head of a request.
RESERVED: Final = 16
RESERVED_FOR_PEER: Final = 4
RESERVED_SECONDS: Final = 2.0


class PatientConfig(uvicorn.Config):
    """uvicorn's configuration with limits on the time for a request's head and on the number of connections.

    With `asks_users` each request has the user at the other end of its connection, where that is known.
    """

    def __init__(
        self,
        *arguments: Any,
        head_seconds: float,
        max_connections: int = 512,
        forwarded_allow_ips: Sequence[str] | None = None,
        asks_users: bool = False,
        **options: Any,
    ) -> None:
        options |= {"http": PatientProtocol, "forwarded_allow_ips": forwarded_allow_ips}
        super().__init__(*arguments, **options)
        self.head_seconds = head_seconds
        self.max_connections = max_connections
        self.asks_users = asks_users
        self.proxies = [ip_network(each) for each in forwarded_allow_ips or ()]
        self.num_connections: Counter[tuple[bytes, bool]] = Counter()  # by peer, and whether reserved

    def find_most(self, client: tuple[str, int] | None) -> int:
        """Return how many connections a client may have that are not reserved."""
        if client and any(ip_address(client[0].partition("%")[0]) in proxy for proxy in self.proxies):
            return self.max_connections
        return math.ceil(self.max_connections * PEER_SHARE)


def find_peer(client: tuple[str, int] | None) -> bytes:
    """Return the address of a client as bytes, of IPv6 the network of 64 bits, which one user has whole."""
    return b"" if client is None else ip_address(client[0].partition("%")[0]).packed[:8]


async def serve_probes(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request of a reserved connection: that of a probe as any, and refuse another."""
    is_probe = scope["path"] in PROBES
    await (app if is_probe else PlainTextResponse(TOO_MANY, 503, {"Connection": "close"}))(
        scope, receive, send
    )


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

    config: PatientConfig
    _timer: asyncio.TimerHandle | None = None  # runs while a head is incomplete
    _place: tuple[bytes, bool]  # the peer, and whether the connection is reserved
    _user: int | None = None
    _num_heads = 0
    _head_bytes = 0  # of the incomplete head, without the read in which it began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, HeadCoalescer(transport, self.loop))
        is_reserved = len(self.connections) > self.config.max_connections
        self._place = find_peer(self.client), is_reserved
        self.config.num_connections[self._place] += 1
        most = RESERVED_FOR_PEER if is_reserved else self.config.find_most(self.client)
        is_full = len(self.connections) > self.config.max_connections + RESERVED
        if is_full or self.config.num_connections[self._place] > most:
            self._refuse(b"503 Service Unavailable", TOO_MANY)
            return
        if is_reserved:
            self.app = partial(serve_probes, self.app)
        if self.config.asks_users:
            self._user = find_user(*map(transport.get_extra_info, ("socket", "peername", "sockname")))
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
        cast(dict[str, Any], self.scope)[USER] = self._user
        self._num_heads += 1
        self._head_bytes = 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.config.num_connections -= Counter([self._place])  # which forgets who has none
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
        seconds = min(self.config.head_seconds, RESERVED_SECONDS if self._place[1] else math.inf)
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
