"""A TLS proxy for servers without TLS: the embedded servers are built without it."""

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Final

# A self-signed certificate for localhost and 127.0.0.1, valid until 2126. It protects nothing.
CERTIFICATE: Final = """\
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUHfVA9PBgqWTtZNUOAushsX1cDZswCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNDA4NTEyNFoYDzIxMjYxMDMx
MDg1MTI0WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQ+deBuxnqZw0aAId7XQvin3hmWs+RY86kAH7nkpumdFtxjsntk9Cpq
H9mySL6FWB0jaVgyPrurl/QQb8TIdMslo28wbTAdBgNVHQ4EFgQUCqvM0YJfAS7f
mLJnG+Uz6FLDR5kwHwYDVR0jBBgwFoAUCqvM0YJfAS7fmLJnG+Uz6FLDR5kwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAObEXQzlXz+IGnWM820pFCmDprr9c5qN/gexoObRmK/VAiAP
OujIa/vmBO+DUQyg7AMopM7TJhui2PQrNEi3B9tjCw==
-----END CERTIFICATE-----
"""
KEY: Final = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgL/g5/7wOA+ShVX37
opwbXSKjsvgB9mvHEGcc8KBeT9qhRANCAAQ+deBuxnqZw0aAId7XQvin3hmWs+RY
86kAH7nkpumdFtxjsntk9CpqH9mySL6FWB0jaVgyPrurl/QQb8TIdMsl
-----END PRIVATE KEY-----
"""


def connect(target: tuple[str, int] | str) -> socket.socket:
    """Connect to a server by host and port, or by the path of its socket."""
    if not isinstance(target, str):
        return socket.create_connection(target)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(target)
    return connection


class Front(ThreadingTCPServer):
    """A TLS server that forwards each connection, in a thread of its own, to an address or a Unix socket."""

    def __init__(
        self, context: ssl.SSLContext, upstream: tuple[str, int] | str, *, is_postgres: bool
    ) -> None:
        self.context = context
        self.upstream = upstream
        self.is_postgres = is_postgres
        self.open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), Passage)

    def end(self) -> None:
        """End all connections, for which server_close waits."""
        for each in list(self.open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Passage(BaseRequestHandler):
    """A handler of one connection. A Postgres client first asks for TLS in a message of its own."""

    server: Front

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            if self.server.is_postgres:
                self.request.recv(8, socket.MSG_WAITALL)
                self.request.sendall(b"S")
            with (
                self.server.context.wrap_socket(self.request, server_side=True) as client,
                connect(self.server.upstream) as upstream,
            ):
                self.server.open.add(upstream)
                try:
                    carry(client, upstream)
                finally:
                    self.server.open.discard(upstream)


def carry(client: ssl.SSLSocket, upstream: socket.socket) -> None:
    """Forward data in both directions until one side closes."""
    while True:
        ready = [client] if client.pending() else select.select([client, upstream], [], [])[0]
        for source, sink in ((client, upstream), (upstream, client)):
            if source in ready:
                data = source.recv(65536)
                if not data:
                    return
                sink.sendall(data)


@contextmanager
def tls_front(
    directory: Path, upstream: tuple[str, int] | str, *, is_postgres: bool = False
) -> Iterator[int]:
    """Serve TLS in front of an address or a Unix socket; yield the port on the loopback interface."""
    key = directory / "key.pem"
    key.write_text(CERTIFICATE + KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(key)
    with Front(context, upstream, is_postgres=is_postgres) as front:
        thread = threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield front.server_address[1]
        finally:
            front.shutdown()
            thread.join()
            front.end()
