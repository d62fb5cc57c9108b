"""An answer's head goes out with its body, and a stream's at once, through uvicorn's own protocol."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from api.limits.patience import PatientConfig, PatientProtocol

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
LAST_REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


class Wire(asyncio.Transport):
    """What was written to it, whether it was closed, and whether the server had kept it for the next request."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False
        self.is_kept = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def turn_until(is_so: Callable[[], object]) -> None:
    while not is_so():  # noqa: ASYNC110 - turns of the event loop are what is counted
        await asyncio.sleep(0)


def open_connection(app: ASGIApp, wire: Wire) -> PatientProtocol:
    """To be called within a running loop."""
    config = PatientConfig(app, head_seconds=60, log_config=None)
    config.load()
    protocol = PatientProtocol(config, ServerState(), {})
    protocol.connection_made(wire)
    return protocol


async def serve(app: ASGIApp, request: bytes) -> Wire:
    wire = Wire()
    protocol = open_connection(app, wire)
    protocol.data_received(request)
    await turn_until(lambda: wire.written and not protocol.tasks)
    if not wire.is_closed:
        wire.is_kept = True
        protocol.connection_lost(None)
    return wire


@pytest.mark.parametrize("request_bytes", [REQUEST, LAST_REQUEST])
def test_an_answer_is_written_once(request_bytes: bytes) -> None:
    wire = asyncio.run(serve(PlainTextResponse("the body"), request_bytes))
    (written,) = wire.written
    head, _, body = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"the body"
    assert wire.is_kept == (request_bytes == REQUEST)


def test_a_head_without_a_body_is_not_kept() -> None:
    wire = asyncio.run(serve(PlainTextResponse(status_code=204), LAST_REQUEST))
    assert b"".join(wire.written).startswith(b"HTTP/1.1 204 ")
    assert wire.is_closed


def test_the_head_of_a_stream_does_not_wait_for_its_first_part() -> None:
    async def stream_slowly() -> list[bytes]:
        go_on = asyncio.Event()

        async def parts() -> Any:
            await go_on.wait()
            yield b"first"
            yield b"second"

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await StreamingResponse(parts())(scope, receive, send)

        wire = Wire()
        protocol = open_connection(app, wire)
        protocol.data_received(REQUEST)
        await turn_until(lambda: wire.written)
        assert wire.written[0].endswith(b"\r\n\r\n")
        go_on.set()
        await turn_until(lambda: not protocol.tasks)
        protocol.connection_lost(None)
        return wire.written[1:]

    rest = b"".join(asyncio.run(asyncio.wait_for(stream_slowly(), 60)))
    assert rest == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"
