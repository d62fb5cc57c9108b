"""(a) A stranger on the network without a key, with real sockets from several addresses of the loopback."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from sqlalchemy import Engine

from api.limits.patience import RESERVED_FOR_PEER
from tests.api_server import api_client
from tests.waiting import wait_for

MOST = 16
SHARE = 12


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with api_client(engine, max_connections=MOST, trusted_proxies="127.0.0.9") as client:
        yield str(client.base_url)


class Peers:
    """Silent connections from addresses of this machine."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url).hostname, urlsplit(url).port
        self._kept = ExitStack()

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def connect(self, address: str) -> socket.socket:
        return self._kept.enter_context(
            socket.create_connection(self._server, timeout=60, source_address=(address, 0))
        )


def answer(connection: socket.socket, path: str = "") -> bytes:
    """The status line that a connection gets; empty if it is closed without one."""
    if path:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    try:
        return connection.recv(65536).partition(b"\r\n")[0]
    except ConnectionResetError:
        return b""


def test_one_peer_gets_its_share_and_keeps_nobody_else_out(url: str) -> None:
    with Peers(url) as peers:
        silent = [peers.connect("127.0.0.2") for _ in range(SHARE)]
        for _ in range(20):
            assert answer(peers.connect("127.0.0.2")) in (b"HTTP/1.1 503 Service Unavailable", b"")
        for path in ("/livez", "/readyz", "/v1/jobs"):
            assert answer(peers.connect("127.0.0.3"), path) == b"HTTP/1.1 200 OK"
        assert answer(silent[0], "/livez") == b"HTTP/1.1 200 OK", "what it has it may use"
        silent[1].close()
        wait_for(
            lambda: answer(peers.connect("127.0.0.2"), "/livez") == b"HTTP/1.1 200 OK", because="one is free"
        )


def test_probes_are_answered_when_all_connections_are_taken(url: str) -> None:
    with Peers(url) as peers:
        for number in range(MOST):
            peers.connect(f"127.0.0.{2 + number % 2}")
        for path in ("/livez", "/readyz"):
            probe = peers.connect("127.0.0.4")
            assert answer(probe, path) == b"HTTP/1.1 200 OK"
            assert answer(probe, "/v1/jobs") == b"HTTP/1.1 503 Service Unavailable", "it is for probes alone"
        # Who holds connections that are kept for probes, in silence, gets few, and loses them within seconds.
        held = [peers.connect("127.0.0.2") for _ in range(RESERVED_FOR_PEER)]
        assert answer(peers.connect("127.0.0.2")) in (b"HTTP/1.1 503 Service Unavailable", b"")
        assert answer(peers.connect("127.0.0.4"), "/livez") == b"HTTP/1.1 200 OK"
        assert answer(held[0]) == b""


def test_a_trusted_proxy_which_has_many_clients_may_have_all_connections(url: str) -> None:
    with Peers(url) as peers:
        connections = [peers.connect("127.0.0.9") for _ in range(SHARE + 1)]
        assert answer(connections[-1], "/v1/jobs") == b"HTTP/1.1 200 OK"
